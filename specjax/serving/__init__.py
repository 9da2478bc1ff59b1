"""Serving: many requests at once, each of which begins and ends when it will."""

from specjax.serving.engine import Engine, EngineStatistics
from specjax.serving.handle import EngineError, Handle, Piece, TextCancelledError, TokenLogprobs
from specjax.serving.scheduler import QueueFullError

__all__ = [
    "Engine",
    "EngineError",
    "EngineStatistics",
    "Handle",
    "Piece",
    "QueueFullError",
    "TextCancelledError",
    "TokenLogprobs",
]
