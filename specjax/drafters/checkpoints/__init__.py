"""How the checkpoints of drafters are read and written, where that takes a file of its own."""
