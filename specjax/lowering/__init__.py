"""Compilation for accelerators that this machine does not have, and the costs of the programs.

The costs are memory, memory traffic, communication and cycles.
"""
