"""Drafting at the edge: a small drafter on this machine, its target on a server, and a text that is exactly the target's."""

from specjax.client.client import Client, connect
from specjax.client.events import Committed, Event, Provisional, Report, Retracted
from specjax.client.writer import Patience

__all__ = ["Client", "Committed", "Event", "Patience", "Provisional", "Report", "Retracted", "connect"]
