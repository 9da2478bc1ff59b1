"""What the objectives of several methods are made of: how windows are read, what lies further ahead, and losses of a family.

A method is one file of `specjax.training.methods`, and says which of these it puts together and with what weights.
"""
