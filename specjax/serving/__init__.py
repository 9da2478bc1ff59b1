"""Serving: many requests at once, each of which begins and ends when it will."""

from specjax.serving.clients import Checked, ClientRow, ClientStatistics, Dropped, Event, Ready, Told
from specjax.serving.device import ClientDrafts
from specjax.serving.engine import Engine, EngineStatistics, follow
from specjax.serving.handle import EngineError, Handle, Piece, TextCancelledError, TokenLogprobs
from specjax.serving.scheduler import QueueFullError

__all__ = [
    "Checked",
    "ClientDrafts",
    "ClientRow",
    "ClientStatistics",
    "Dropped",
    "Engine",
    "EngineError",
    "EngineStatistics",
    "Event",
    "Handle",
    "Piece",
    "QueueFullError",
    "Ready",
    "TextCancelledError",
    "TokenLogprobs",
    "Told",
    "follow",
]
