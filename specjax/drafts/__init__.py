"""Drafts: the shapes they can have, a draft that fills one, and what verification says of it."""
