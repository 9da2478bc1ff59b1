"""Engines are tested with schedulers that nobody may use without the engine's lock."""

from tests.guarded_scheduler import guard_schedulers, unguarded_uses

__all__ = ["guard_schedulers", "unguarded_uses"]
