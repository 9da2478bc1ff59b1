"""Figures and tables of drafting and decoding."""
