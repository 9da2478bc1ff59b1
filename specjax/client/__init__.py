"""Drafting at the edge: a small drafter on this machine, and its target on a server.

The committed text is exactly the target's own text.
"""

from specjax.client.client import Client, connect
from specjax.client.events import (
    CommittedEvent,
    ProvisionalEvent,
    RetractedEvent,
    TextEvent,
    TextReport,
)
from specjax.client.writer import Patience

__all__ = [
    "Client",
    "CommittedEvent",
    "Patience",
    "ProvisionalEvent",
    "RetractedEvent",
    "TextEvent",
    "TextReport",
    "connect",
]
