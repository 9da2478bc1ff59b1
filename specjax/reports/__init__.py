"""Pictures of what was drafted and decoded."""
