"""Pictures and tables of what was drafted and decoded."""
