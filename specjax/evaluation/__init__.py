"""Measures of a drafter's quality, and tests that it is correct."""
