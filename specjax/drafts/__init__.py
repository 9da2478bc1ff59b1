"""Drafts: their shapes, a draft of one batch, and the verdict of its verification."""
