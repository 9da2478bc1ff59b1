"""Target models: configuration, parameters, forward pass, and Hugging Face checkpoints."""
