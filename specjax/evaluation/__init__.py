"""How good a drafter is, and whether it keeps its contract."""
