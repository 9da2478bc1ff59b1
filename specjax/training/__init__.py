"""Training of targets and drafters."""
