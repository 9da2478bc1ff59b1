"""Training of targets and drafters. What differs between methods is one file each in `specjax.training.methods`, and what those
share lies in `specjax.training.objectives`."""
