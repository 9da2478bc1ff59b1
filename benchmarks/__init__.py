"""Measurements, run as scripts; see README.md beside this file."""
