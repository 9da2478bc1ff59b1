"""The checkpoint formats of drafters whose reading and writing takes a file of its own."""
