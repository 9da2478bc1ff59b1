"""Target models: their shape, their parameters, their forward pass, and Hugging Face checkpoints."""
