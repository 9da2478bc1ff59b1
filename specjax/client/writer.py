"""The generation of one text on a client: when to send, when to draft, and which events to report.

All of it runs in one thread, in a loop of short steps. (A link may open its connection in another
thread.) A verdict that arrives while the client drafts waits until that draft is made. Otherwise a
step ends as soon as a frame arrives, or at the next timeout. The time is read from the link only.
So with a simulated link, a whole run, network failures included, is determined by a seed.
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

MAX_DRAFTS_AHEAD = 4
"""The maximum number of drafts that a client makes while it waits for a verdict.

It stops earlier when these drafts together are as deep as the server's limit.
"""


@dataclass(frozen=True)
class Patience:
    """The timeouts of a client, in seconds.

    Attributes:
        provisional: time without progress after which the drafter continues alone, provisionally.
            Progress is a verdict, hidden states, or a draft sent.
        again: time without an answer after which a message is sent again. If four rounds (round
            trip and verification) take longer, their time is used. It doubles with each repetition,
            up to 16 times.
        lost: time without any answer after which the connection is replaced by a new one. If eight
            rounds take longer, their time is used. It doubles with each replacement in a row, up to
            16 times.
        connecting: time for an attempt to connect.
        retry: mean time before the next attempt to connect. It doubles with each attempt, up to
            ``most_retry``. The actual time is 0.5 to 1.5 times as long, at random.
        most_retry: see ``retry``.
        server: time without any answer after which the text ends as it is; None for no limit.

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
    """An object that stores the committed tokens of a text, such as a journal."""

    def keep(self, exchange: Exchange) -> None:
        """Store the committed tokens. It is called after each verdict."""
        ...


class Writer:
    """The generation of one text. Iterate over it once for the events.

    Attributes:
        exchange: the state of the text in the protocol.
        speculation: the drafts without a verdict.
        report: the report on the text so far.
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
        """Make a writer that has sent nothing yet.

        Args:
            exchange: the state of the text, new or restored from a journal.
            device: the drafter.
            link: the connection to the server.
            patience: the timeouts.
            tokenizer: the tokenizer; None for events without text.
            stop: stop strings. The text ends before the first one that occurs.
            is_offline: whether to generate with the drafter alone, and never contact the server.
            journal: stores the text whenever tokens are committed.
            jitter: spreads attempts to connect, so that many clients do not reconnect at the same
                moment.
            is_chat: whether the text is the answer in a chat; see `specjax.text.FinalChannel`.
        """
        request = exchange.request
        self.exchange, self.report = exchange, TextReport()
        self._device, self._link, self._patience = device, link, patience
        self.speculation = Speculation(device, Settings.of(request.params), exchange.tokens)
        self._pace = Pace(list(device.shapes))
        self._display = Display(
            tokenizer, request.prompt, stop, is_alone=is_offline, is_chat=is_chat
        )
        self._is_offline = is_offline
        self._journal, self._jitter = journal, jitter or random.Random()
        self._prompt_length = len(request.prompt)
        self._events: list[TextEvent] = []
        self._is_connected = self._is_connecting = False
        self._started_at = link.now()
        # The newest frame received over this connection, or the time when it was opened.
        self._received_at = self._started_at
        # The newest frame received over any connection.
        self._answered_at = self._started_at
        # The newest frame sent.
        self._sent_at = self._started_at
        # The first sending of the newest message, which may have been sent again since.
        self._waits_since = self._started_at
        # The newest verdict, hidden states or draft sent.
        self._progress_at = self._started_at
        # The next attempt to connect.
        self._retry_at = self._started_at
        # Lost connections, repeated messages, and connections given up as silent, all in a row.
        self._retries = self._resends = self._silent_losses = 0
        # The newest draft: whether its round trip is unknown, and whether it was made ahead.
        self._is_round_trip_unknown = self._is_kept = False
        self._bytes_at_send = (0, 0)  # bytes up and down when the newest draft was sent
        eos_token_ids = request.params.eos_token_ids
        self._stop_token_ids = frozenset(
            device.target.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        )

    def __iter__(self) -> Iterator[TextEvent]:
        """Yield the events until the text ends."""
        if len(self.exchange.tokens) > self._prompt_length:  # another process has committed tokens
            self.exchange.end_if_whole(self._stop_token_ids)
            is_whole = self.exchange.phase == "over"
            self._events += self._display.commit(
                self.exchange.tokens[self._prompt_length :], is_last=is_whole
            )
        try:
            while True:
                yield from self._events
                self._events.clear()
                if self._is_over():
                    break
                self._step()
        finally:
            self._finish()

    # --- one step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        """Do what is next (connect, send, draft), then process frames.

        If nothing was drafted, wait for a frame until the next timeout.
        """
        try:
            if not self._is_offline:
                self._connect()
                if self.exchange.phase == "ready":
                    self._send_draft()
                elif self._is_connected and self._link.now() - self._sent_at > self._resend_after:
                    self._send(self.exchange.again(), is_again=True)
                    self._is_round_trip_unknown, self._resends = True, self._resends + 1
            has_drafted = self._draft_ahead()
            self._listen(0.0 if has_drafted else self._until_next())
        except LinkLostError as error:
            self._handle_lost_link(error)

    def _is_over(self) -> bool:
        if self.exchange.phase == "over" or self._display.has_stopped:
            return True
        if self._is_offline:
            return not self._has_room()
        timeout = self._patience.server
        return timeout is not None and self._link.now() - self._answered_at > timeout

    def _connect(self) -> None:
        now, patience = self._link.now(), self._patience
        if self._is_connected:
            # In the phase "ready" the server waits for this client's draft. Its silence is then no
            # sign of a lost connection.
            if now - self._silent_since > self._lost_after and self.exchange.phase != "ready":
                self._silent_losses += 1
                raise LinkLostError("the server does not answer")
            return
        if self._is_connecting:
            if self._link.is_open():
                self._is_connected, self._is_connecting, self._received_at = True, False, now
                self._send(self.exchange.hello())
        elif now >= self._retry_at:
            self._link.connect(patience.connecting)
            self._is_connecting = True

    def _handle_lost_link(self, error: LinkLostError) -> None:
        """Close the connection, and set the time of the next attempt to connect.

        Raises:
            FrameError: The server cannot decode this client's frames, so that a new connection
                would not help.
        """
        if error.code == 4400:  # see `FrameError`
            raise FrameError(
                error.code, f"the server does not understand this client: {error}"
            ) from None
        self._link.close()
        self.exchange.lost()
        self._is_connected = self._is_connecting = False
        # The verdict will come over another connection than its draft.
        self._is_round_trip_unknown = True
        # The wait is longer with each failure, and random, so that the clients of a server that
        # restarts do not all connect at the same moment.
        wait = min(self._patience.retry * 2**self._retries, self._patience.most_retry)
        self._retry_at = self._link.now() + wait * (0.5 + self._jitter.random())
        self._retries += 1

    @property
    def _silent_since(self) -> float:
        """The time at which the current silence of the server began.

        It is the time of the newest frame received, or of the first sending of the newest message
        if that is later. So time in which the client had sent nothing is no silence.
        """
        return max(self._received_at, self._waits_since)

    def _send(self, frame: bytes, *, is_again: bool = False) -> None:
        self.report.bytes_up += len(frame)
        self._sent_at = self._link.now()
        if not is_again:
            self._waits_since = self._sent_at
        self._link.send(frame)

    # The network may be slower than measured. So each of these timeouts doubles when it passes, up
    # to 16 times.

    @property
    def _resend_after(self) -> float:
        usual = max(self._patience.again, 4 * ((self._pace.round_trip or 0.0) + self._pace.server))
        return usual * 2 ** min(self._resends, 4)

    @property
    def _lost_after(self) -> float:
        usual = max(self._patience.lost, 8 * ((self._pace.round_trip or 0.0) + self._pace.server))
        return usual * 2 ** min(self._silent_losses, 4)

    def _until_next(self) -> float:
        """Return the seconds until the next timeout; at most 0.01 while a connection is opened."""
        now, patience = self._link.now(), self._patience
        times = [self._retry_at]
        if self._is_connected:
            times = [self._silent_since + self._lost_after, self._sent_at + self._resend_after]
        if not self._is_provisional() and self._has_room():
            times.append(self._progress_at + patience.provisional)
        if patience.server is not None:
            times.append(self._answered_at + patience.server)
        # A millisecond later, so that the timeout has surely passed.
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
            self._received_at = self._answered_at = self._link.now()
            self._silent_losses = 0
            # A frame that causes no event, such as a duplicate, resets no other doubled timeout.
            if self._process(frame):
                self._retries = self._resends = 0
            if self.exchange.phase == "over" or self._display.has_stopped:
                return
            frame = self._link.receive(0.0)

    # --- what comes -------------------------------------------------------------------------------

    def _process(self, frame: bytes) -> bool:
        """Process a frame, and return whether it caused any event."""
        try:
            events = self.exchange.receive(frame)
        except ServerBusyError as error:
            raise LinkLostError(str(error)) from None
        except FrameError as error:  # the frame was damaged: a new connection recovers its content
            raise LinkLostError(str(error)) from None
        link_error = None
        for event in events:
            # If sending fails, the other events must still be handled: their tokens are committed.
            try:
                self._handle(event)
            except LinkLostError as error:
                link_error = error
        if link_error is not None:
            raise link_error
        return bool(events)

    def _handle(self, event: ExchangeEvent) -> None:
        if isinstance(event, SendFrame):
            self._send(event.frame)
        elif isinstance(event, TextOpened):
            self._check_bounds()
        elif isinstance(event, FeaturesReceived):
            self._progress_at = self._link.now()
            self._append_features(event)
        else:
            self._commit(event)

    def _append_features(self, event: FeaturesReceived) -> None:
        self.speculation.append_remote(event.tokens, event.following, event.arrays)

    def _check_bounds(self) -> None:
        """Raise InputError if the server does not fit the drafter, or the text has no room.

        The room is that of the server or of this client's device, whichever is smaller.
        """
        bounds, device, exchange = self.exchange.bounds, self._device, self.exchange
        assert bounds is not None
        if bounds.tells.keys() != device.hears.keys():
            raise InputError(
                f"drafter: it needs {sorted(device.hears)}, but the server was started for another"
                f" drafter and sends {sorted(bounds.tells)}; give the drafter that the server was"
                " started with (serve --drafter)"
            )
        if wrong := [
            name for name, shape in bounds.tells.items() if tuple(shape) != device.hears[name]
        ]:
            raise InputError(
                f"drafter: it needs {wrong[0]} of shape {device.hears[wrong[0]]}, but the server"
                f" sends {bounds.tells[wrong[0]]}, since it has another target; give a drafter of"
                " the server's target"
            )
        room = min(bounds.capacity, device.capacity)
        max_new_tokens = exchange.request.params.max_new_tokens
        if self._prompt_length + max_new_tokens > room:
            raise InputError(
                f"prompt ({self._prompt_length} tokens) plus max_new_tokens={max_new_tokens}:"
                f" there is room for {room}; shorten the prompt, or lower max_new_tokens"
            )

    def _commit(self, event: TokensEmitted) -> None:
        report, now = self.report, self._link.now()
        self._progress_at = now
        accepted = len(event.tokens) - 1
        report.rounds += 1
        report.drafted += event.drafted
        report.accepted += accepted
        # The round trip is unknown if the draft was sent twice: the verdict may answer either copy.
        if not self._is_round_trip_unknown:
            seconds = now - self._sent_at
            report.round_trips.append(seconds)
            up, down = self._bytes_at_send
            self._pace.round(
                seconds=seconds,
                server=min(event.seconds, seconds),
                up=report.bytes_up - up,
                down=report.bytes_down - down,
                drafted=event.drafted,
                accepted=accepted,
                is_kept=self._is_kept,
            )
        text_events = self._display.commit(event.tokens, is_last=self.exchange.phase == "over")
        self._events += text_events
        report.retracted += sum(
            len(shown.tokens) for shown in text_events if isinstance(shown, RetractedEvent)
        )
        try:
            self._continue_after(event.tokens)
        finally:  # the tokens are committed, even if sending the next draft failed
            if self._journal is not None:
                self._journal.keep(self.exchange)

    def _continue_after(self, tokens: Sequence[int]) -> None:
        """Send the next draft at once if it exists already, and follows the committed tokens."""
        if self._display.has_stopped:
            return
        has_draft = self.speculation.commit(tokens)
        # Send first. The journal and the hidden states can wait; the server should not.
        if has_draft and self.exchange.phase == "ready" and self._is_worth_sending():
            self.report.kept += 1
            self._send_tree(is_kept=True)

    # --- drafting ---------------------------------------------------------------------------------

    def _is_worth_sending(self) -> bool:
        return bool(self._display.provisional) or self._pace.is_worth_keeping(
            len(self.speculation.path)
        )

    def _send_draft(self) -> None:
        if not self.speculation.stretches or not self._is_worth_sending():
            self._draft(self._depth(), from_committed=True)
        self._send_tree()

    def _send_tree(self, *, is_kept: bool = False) -> None:
        bounds = self.exchange.bounds
        assert bounds is not None
        # A verdict emits one token more than it accepts. So a draft needs at most one token less
        # than the text may still have.
        depth = max(min(bounds.depth, self._tokens_left - 1), 0)
        tree = self.speculation.to_send(
            bounds.nodes, depth, as_chain=bool(self._display.provisional)
        )
        self._bytes_at_send = (self.report.bytes_up, self.report.bytes_down)
        self._is_round_trip_unknown = False
        self._is_kept = is_kept
        self.report.depths.append(tree.depth)
        self._progress_at = self._link.now()
        self._send(self.exchange.draft(tree))

    def _draft_ahead(self) -> bool:
        """Draft one more stretch while no answer comes, and return whether one was drafted."""
        speculation = self.speculation
        if self._is_provisional():
            if not self._has_room():
                return False
            self._draft(self._device.alone)
            self._show()
            return True
        if self.exchange.phase != "waiting" or not self._has_room():
            return False
        depth_ahead = sum(len(stretch.path) for stretch in speculation.stretches[1:])
        bounds = self.exchange.bounds
        # The first stretch is the draft that awaits its verdict.
        num_ahead = len(speculation.stretches) - 1
        if bounds is None or depth_ahead >= bounds.depth or num_ahead >= MAX_DRAFTS_AHEAD:
            return False
        self._draft(self._depth())
        return True

    def _draft(self, depth: int, *, from_committed: bool = False) -> None:
        started = self._link.now()
        (self.speculation.redraft if from_committed else self.speculation.draft)(depth)
        if depth in self._pace.depths:
            self._pace.drafted(depth, self._link.now() - started)

    def _depth(self) -> int:
        """Return the depth of the next draft, within the limits of the server and the text.

        If all compiled depths are above these limits it is the smallest one, and `_send_tree` cuts
        the draft.
        """
        bounds = self.exchange.bounds
        max_depth = min(
            self._tokens_left, self._pace.depths[-1] if bounds is None else bounds.depth
        )
        possible = [depth for depth in self._pace.depths if depth <= max_depth]
        return min(self._pace.choose(), possible[-1] if possible else self._pace.depths[0])

    @property
    def _tokens_left(self) -> int:
        """The number of tokens that the text may still have."""
        return self.exchange.request.params.max_new_tokens - (
            len(self.exchange.tokens) - self._prompt_length
        )

    def _has_room(self) -> bool:
        """Return whether another draft may follow the stretches.

        It may not if they reach ``max_new_tokens``, contain a stop token, or end with an empty one.
        """
        stretches, path = self.speculation.stretches, self.speculation.path
        # The newest draft is empty if prompt lookup has found nothing.
        if stretches and not stretches[-1].path:
            return False
        return len(path) < self._tokens_left and not self._stop_token_ids.intersection(path)

    def _is_provisional(self) -> bool:
        """Return whether the drafter continues alone, because no answer has come for long."""
        if self.exchange.phase in ("ready", "over"):
            return False
        return self._is_offline or self._link.now() - self._progress_at > self._patience.provisional

    def _show(self) -> None:
        """Report the provisional tokens that were not reported yet."""
        path = self.speculation.path[: self._tokens_left]
        end = next(
            (index for index, token in enumerate(path, 1) if token in self._stop_token_ids),
            len(path),
        )
        self._events += self._display.show(path[len(self._display.provisional) : end])

    def _finish(self) -> None:
        """Complete the report, end the session on the server, and close the connection."""
        exchange, report, display = self.exchange, self.report, self._display
        report.tokens, report.text = display.tokens, display.text
        report.provisional_tokens = tuple(token for token, _ in display.provisional)
        report.provisional = "".join(text for _, text in display.provisional)
        report.finish_reason = "stop" if display.has_stopped else exchange.over or "offline"
        if exchange.request.params.grammar is not None:
            # A stop string ends the text within its grammar.
            is_cut = display.has_stopped
            report.grammar_completed = bool(exchange.grammar_completed) and not is_cut
        report.seconds, report.resumes = self._link.now() - self._started_at, exchange.resumes
        if self._is_connected and (frame := exchange.close()) is not None:
            with suppress(LinkLostError):
                self._send(frame)
        self._link.close()
