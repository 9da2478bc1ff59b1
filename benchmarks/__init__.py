"""Measurements, run as scripts; see README.md in this folder."""
