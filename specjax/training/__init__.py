"""Training of targets and drafters. What differs between methods is one file each in `specjax.training.methods`."""
