"""Schedulers that fail a test if they are used without the engine's lock."""

from tests.guarded_scheduler import guard_schedulers, unguarded_uses

__all__ = ["guard_schedulers", "unguarded_uses"]
