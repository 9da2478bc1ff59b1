"""Training of targets and drafters.

Each training method is one file in `specjax.training.methods`. Code that methods share is in
`specjax.training.objectives`.
"""
