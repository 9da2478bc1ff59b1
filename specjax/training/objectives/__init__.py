"""Parts of objectives that several methods share: reading windows, labels further ahead, losses.

Each method, a file of `specjax.training.methods`, combines these parts and sets their weights.
"""
