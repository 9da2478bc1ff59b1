"""Predictions and measurements of the speed-up by speculation, and the choice of a draft."""
