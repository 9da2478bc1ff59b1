"""One text on its way: what is sent when, what is drafted meanwhile, and what is told of it.

Everything happens in one loop, step by step, and every step ends soon: so a verdict is taken within one draft's time. The clock
is the link's. With a simulated link the whole course of a text, with all that goes wrong on the way, follows from a seed.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from specjax.client.device import ClientDevice, Settings
from specjax.client.display import Display
from specjax.client.events import RetractedEvent, TextEvent, TextReport
from specjax.client.exchange import (
    Exchange,
    ExchangeEvent,
    FeaturesReceived,
    SendFrame,
    ServerBusyError,
    TextOpened,
    TokensEmitted,
)
from specjax.client.link import Link, LinkLostError
from specjax.client.pace import Pace
from specjax.client.speculation import Speculation
from specjax.errors import InputError
from specjax.wire import FrameError

MOST_STRETCHES = 4
"""Drafts that are made while a verdict is under way, at most; fewer where they are as deep together as the server takes."""


@dataclass(frozen=True)
class Patience:
    """How long a client waits for what, in seconds.

    Attributes:
        provisional: without an answer, before the drafter goes on alone, provisionally.
        again: before a message is sent again; at least four round trips.
        lost: without any answer, before the connection is given up and another one is made.
        connecting: for a connection.
        retry: before the next attempt to connect, doubled each time up to ``most_retry``.
        most_retry: see ``retry``.
        server: without any answer, before the text ends as it is; None: any time.

    Examples:
        >>> from specjax.client import Patience
        >>> Patience(provisional=0.5).lost
        10.0
    """

    provisional: float = 1.5
    again: float = 2.0
    lost: float = 10.0
    connecting: float = 5.0
    retry: float = 0.25
    most_retry: float = 8.0
    server: float | None = None


class Keeps(Protocol):
    """Whoever keeps a text as far as it is committed."""

    def keep(self, exchange: Exchange) -> None:
        """It has grown."""
        ...


class Writer:
    """Writes one text. Iterate over it, once, for the events.

    Attributes:
        exchange: how far both sides have come.
        speculation: what the drafter believes of the rest.
        report: what it took so far.
    """

    def __init__(
        self,
        exchange: Exchange,
        device: ClientDevice,
        link: Link,
        *,
        patience: Patience = Patience(),
        tokenizer: Any = None,
        stop: Sequence[str] = (),
        is_offline: bool = False,
        journal: Keeps | None = None,
        jitter: random.Random | None = None,
        is_chat: bool = False,
    ) -> None:
        """Nothing is sent yet.

        Args:
            exchange: of the text, from its beginning or from where another process has left it.
            device: that drafts.
            link: to the server.
            patience: how long to wait for what.
            tokenizer: None: events have tokens and no text.
            stop: strings before the first of which the text ends.
            is_offline: write with the drafter alone, and never ask the server.
            journal: is told whenever tokens were committed.
            jitter: spreads attempts to connect, so that many clients do not come back at one moment.
            is_chat: the text is a chat's answer, see `specjax.text.FinalChannel`.
        """
        asked = exchange.request
        self.exchange, self.report = exchange, TextReport()
        self._device, self._link, self._patience = device, link, patience
        self.speculation = Speculation(device, Settings.of(asked.params), exchange.tokens)
        self._pace = Pace(list(device.shapes))
        self._display = Display(tokenizer, asked.prompt, stop, is_alone=is_offline, is_chat=is_chat)
        self._is_offline = is_offline
        self._journal, self._jitter = journal, jitter or random.Random()
        self._prompt = len(asked.prompt)
        self._events: list[TextEvent] = []
        self._is_connected = self._is_connecting = False
        # When something last came; was sent; was sent first, for which an answer is awaited; and when the text last went on.
        self._begun = self._heard_at = self._sent_at = self._waits_since = self._asked_at = self._retry_at = link.now()
        self._answered_at = self._begun  # when the server last said anything, over whichever connection
        self._retries = self._resends = self._silent = 0
        self._resent = self._is_kept = False  # of the newest draft
        self._sizes = (0, 0)  # bytes up and down when the newest draft was sent
        ends = asked.params.eos_token_ids
        self._ends = frozenset(device.target.config.eos_token_ids if ends is None else ends)

    def __iter__(self) -> Iterator[TextEvent]:
        """The events, until the text is over."""
        if len(self.exchange.tokens) > self._prompt:  # of another process
            self.exchange.end_if_whole(self._ends)
            is_whole = self.exchange.phase == "over"
            self._events += self._display.commit(self.exchange.tokens[self._prompt :], is_last=is_whole)
        try:
            while True:
                yield from self._events
                self._events.clear()
                if self._is_over():
                    break
                self._step()
        finally:
            self._finish()

    # --- one step ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Whatever is next: connect, send, draft; and take what has come."""
        try:
            if not self._is_offline:
                self._connect()
                if self.exchange.phase == "ready":
                    self._send_draft()
                elif self._is_connected and self._link.now() - self._sent_at > self._resend_after:
                    self._send(self.exchange.again(), is_again=True)
                    self._resent, self._resends = True, self._resends + 1
            has_drafted = self._draft_on()
            self._listen(0.0 if has_drafted else self._until_next())
        except LinkLostError as error:
            self._lose(error)

    def _is_over(self) -> bool:
        if self.exchange.phase == "over" or self._display.has_stopped:
            return True
        if self._is_offline:
            return not self._has_room()
        limit = self._patience.server
        return limit is not None and self._link.now() - self._answered_at > limit

    def _connect(self) -> None:
        now, patience = self._link.now(), self._patience
        if self._is_connected:
            if now - self._silent_since > self._lost_after and self.exchange.phase != "ready":
                self._silent += 1
                raise LinkLostError("no answer")
            return
        if self._is_connecting:
            if self._link.is_open():
                self._is_connected, self._is_connecting, self._heard_at = True, False, now
                self._send(self.exchange.hello())
        elif now >= self._retry_at:
            self._link.connect(patience.connecting)
            self._is_connecting = True

    def _lose(self, error: LinkLostError) -> None:
        """The connection is gone; the next attempt comes after a while."""
        if error.code == 4400:  # what this client says cannot be read: it would not be the next time either
            raise FrameError(error.code, f"the server does not understand this client: {error}") from None
        self._link.close()
        self.exchange.lost()
        self._is_connected = self._is_connecting = False
        self._resent = True  # a round over two connections says nothing of either
        wait = min(self._patience.retry * 2**self._retries, self._patience.most_retry)
        self._retry_at = self._link.now() + wait * (0.5 + self._jitter.random())
        self._retries += 1

    @property
    def _silent_since(self) -> float:
        """Since when an answer is awaited that has not come. The client's own work is nobody's silence."""
        return max(self._heard_at, self._waits_since)

    def _send(self, frame: bytes, *, is_again: bool = False) -> None:
        self.report.bytes_up += len(frame)
        self._sent_at = self._link.now()
        if not is_again:
            self._waits_since = self._sent_at
        self._link.send(frame)

    # A network may be slower than was thought. So each time that there is no answer the next is waited for twice as long.

    @property
    def _resend_after(self) -> float:
        usual = max(self._patience.again, 4 * ((self._pace.round_trip or 0.0) + self._pace.server))
        return usual * 2 ** min(self._resends, 4)

    @property
    def _lost_after(self) -> float:
        usual = max(self._patience.lost, 8 * ((self._pace.round_trip or 0.0) + self._pace.server))
        return usual * 2 ** min(self._silent, 4)

    def _until_next(self) -> float:
        """Seconds until something is to be done though nothing has come."""
        now, patience = self._link.now(), self._patience
        times = [self._retry_at]
        if self._is_connected:
            times = [self._silent_since + self._lost_after, self._sent_at + self._resend_after]
        if not self._is_provisional() and self._has_room():
            times.append(self._asked_at + patience.provisional)
        if patience.server is not None:
            times.append(self._answered_at + patience.server)
        wait = max(min(times) - now, 0.0) + 1e-3
        return min(wait, 0.01) if self._is_connecting else wait

    def _listen(self, timeout: float) -> None:
        if not self._is_connected:
            if timeout:
                self._link.sleep(timeout)
            return
        frame = self._link.receive(timeout)
        while frame is not None:
            self.report.bytes_down += len(frame)
            self._heard_at = self._answered_at = self._link.now()
            self._silent = 0
            if self._take(frame):
                self._retries = self._resends = 0
            if self.exchange.phase == "over" or self._display.has_stopped:
                return
            frame = self._link.receive(0.0)

    # --- what comes ----------------------------------------------------------------------------------------------------

    def _take(self, frame: bytes) -> bool:
        """Follow a frame. Whether it said anything new."""
        try:
            news = self.exchange.receive(frame)
        except ServerBusyError as error:
            raise LinkLostError(str(error)) from None
        except FrameError as error:  # damaged on the way: what was lost is asked for again
            raise LinkLostError(str(error)) from None
        lost = None
        for each in news:
            try:
                self._follow(each)
            except LinkLostError as error:  # while something was sent: the rest of the news is true all the same
                lost = error
        if lost is not None:
            raise lost
        return bool(news)

    def _follow(self, news: ExchangeEvent) -> None:
        if isinstance(news, SendFrame):
            self._send(news.frame)
        elif isinstance(news, TextOpened):
            self._check_bounds()
        elif isinstance(news, FeaturesReceived):
            self._asked_at = self._link.now()
            self._hear(news)
        else:
            self._commit(news)

    def _hear(self, news: FeaturesReceived) -> None:
        self.speculation.append_remote(news.tokens, news.following, news.arrays)

    def _check_bounds(self) -> None:
        """The server tells what this drafter must hear, and takes texts as long as this one."""
        bounds, device, exchange = self.exchange.bounds, self._device, self.exchange
        assert bounds is not None
        if bounds.tells.keys() != device.hears.keys():
            raise InputError(
                f"drafter: must be told {sorted(device.hears)}, and the server tells {sorted(bounds.tells)}: it is there for "
                "clients with another drafter (serve --drafter)"
            )
        if wrong := [name for name, shape in bounds.tells.items() if tuple(shape) != device.hears[name]]:
            raise InputError(
                f"drafter: must be told {wrong[0]} of shape {device.hears[wrong[0]]}, and the server's is "
                f"{bounds.tells[wrong[0]]}: it has another target"
            )
        room = min(bounds.capacity, device.capacity)
        max_new_tokens = exchange.request.params.max_new_tokens
        if self._prompt + max_new_tokens > room:
            raise InputError(
                f"prompt ({self._prompt} tokens) plus max_new_tokens={max_new_tokens}: there is room for {room}; shorten the "
                "prompt, or ask for fewer"
            )

    def _commit(self, news: TokensEmitted) -> None:
        report, now = self.report, self._link.now()
        self._asked_at = now
        accepted = len(news.tokens) - 1
        report.rounds += 1
        report.drafted += news.drafted
        report.accepted += accepted
        if not self._resent:
            seconds = now - self._sent_at
            report.round_trips.append(seconds)
            up, down = self._sizes
            self._pace.round(
                seconds=seconds,
                server=min(news.seconds, seconds),
                up=report.bytes_up - up,
                down=report.bytes_down - down,
                drafted=news.drafted,
                accepted=accepted,
                is_kept=self._is_kept,
            )
        events = self._display.commit(news.tokens, is_last=self.exchange.phase == "over")
        self._events += events
        report.retracted += sum(len(each.tokens) for each in events if isinstance(each, RetractedEvent))
        try:
            self._go_on(news)
        finally:
            if self._journal is not None:
                self._journal.keep(self.exchange)

    def _go_on(self, news: TokensEmitted) -> None:
        """Below the tokens that were committed."""
        report = self.report
        if self._display.has_stopped:
            return
        is_left = self.speculation.commit(news.tokens)
        # Before anything else is worked out: what has been drafted already is on its way at once.
        if is_left and self.exchange.phase == "ready" and self._is_worth_sending():
            report.kept += 1
            self._send_tree(is_kept=True)

    # --- drafting ------------------------------------------------------------------------------------------------------

    def _is_worth_sending(self) -> bool:
        return bool(self._display.provisional) or self._pace.is_worth_keeping(len(self.speculation.path))

    def _send_draft(self) -> None:
        if not self.speculation.stretches or not self._is_worth_sending():
            self._draft(self._depth(), anew=True)
        self._send_tree()

    def _send_tree(self, *, is_kept: bool = False) -> None:
        bounds = self.exchange.bounds
        assert bounds is not None
        left = self._left - 1  # the last token is the target's own
        tree = self.speculation.to_send(bounds.nodes, max(min(bounds.depth, left), 0), as_chain=bool(self._display.provisional))
        self._sizes, self._resent, self._is_kept = (self.report.bytes_up, self.report.bytes_down), False, is_kept
        self.report.depths.append(tree.depth)
        self._asked_at = self._link.now()
        self._send(self.exchange.draft(tree))

    def _draft_on(self) -> bool:
        """While an answer is awaited: one more stretch, where it may be of use. Whether there was something to draft."""
        speculation = self.speculation
        if self._is_provisional():
            if not self._has_room():
                return False
            self._draft(self._device.alone)
            self._show()
            return True
        if self.exchange.phase != "waiting" or not self._has_room():
            return False
        ahead = sum(len(stretch.path) for stretch in speculation.stretches[1:])
        bounds = self.exchange.bounds
        if bounds is None or ahead >= bounds.depth or len(speculation.stretches) > MOST_STRETCHES:
            return False
        self._draft(self._depth())
        return True

    def _draft(self, depth: int, *, anew: bool = False) -> None:
        started = self._link.now()
        (self.speculation.redraft if anew else self.speculation.draft)(depth)
        if depth in self._pace.depths:
            self._pace.drafted(depth, self._link.now() - started)

    def _depth(self) -> int:
        """How deep to draft now: no deeper than the server takes, or the text may still become."""
        bounds = self.exchange.bounds
        most = min(self._left, self._pace.depths[-1] if bounds is None else bounds.depth)
        possible = [depth for depth in self._pace.depths if depth <= most]
        return min(self._pace.choose(), possible[-1] if possible else self._pace.depths[0])

    @property
    def _left(self) -> int:
        """Tokens that the text may still have."""
        return self.exchange.request.params.max_new_tokens - (len(self.exchange.tokens) - self._prompt)

    def _has_room(self) -> bool:
        """Whether the drafter could go on: there is room, and the text that it believes in has not ended."""
        stretches, path = self.speculation.stretches, self.speculation.path
        if stretches and not stretches[-1].path:  # it has nothing to offer, as prompt lookup where nothing is found
            return False
        return len(path) < self._left and not self._ends.intersection(path)

    def _is_provisional(self) -> bool:
        """Whether no answer has come for so long that the drafter goes on alone."""
        if self.exchange.phase in ("ready", "over"):
            return False
        return self._is_offline or self._link.now() - self._asked_at > self._patience.provisional

    def _show(self) -> None:
        """Tell of provisional tokens that were not told of."""
        path = self.speculation.path[: self._left]
        end = next((place for place, token in enumerate(path, 1) if token in self._ends), len(path))
        self._events += self._display.show(path[len(self._display.provisional) : end])

    def _finish(self) -> None:
        """The report is whole, and the server is told that the text is not wanted any more."""
        exchange, report, display = self.exchange, self.report, self._display
        report.tokens, report.text = display.tokens, display.text
        report.provisional_tokens = tuple(token for token, _ in display.provisional)
        report.provisional = "".join(text for _, text in display.provisional)
        report.finish_reason = "stop" if display.has_stopped else exchange.over or "offline"
        report.seconds, report.resumes = self._link.now() - self._begun, exchange.resumes
        if self._is_connected and (frame := exchange.close()) is not None:
            with suppress(LinkLostError):
                self._send(frame)
        self._link.close()
