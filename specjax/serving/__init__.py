"""Serving: many requests at once, each of which begins and ends when it will."""

from specjax.serving.clients import (
    ClientRow,
    ClientStatistics,
    DraftVerified,
    RowDropped,
    RowEvent,
    RowFeatures,
    RowReady,
)
from specjax.serving.device import ClientDrafts
from specjax.serving.engine import Engine, EngineStatistics, follow
from specjax.serving.handle import EngineError, Handle, Piece, TextCancelledError, TokenLogprobs
from specjax.serving.scheduler import QueueFullError
from specjax.serving.totals import KindCounts

__all__ = [
    "ClientDrafts",
    "ClientRow",
    "ClientStatistics",
    "DraftVerified",
    "Engine",
    "EngineError",
    "EngineStatistics",
    "Handle",
    "KindCounts",
    "Piece",
    "QueueFullError",
    "RowDropped",
    "RowEvent",
    "RowFeatures",
    "RowReady",
    "TextCancelledError",
    "TokenLogprobs",
    "follow",
]
