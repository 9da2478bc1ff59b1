"""What compilers make of programs for accelerators that need not be here: their memory, traffic, exchange and cycles."""
