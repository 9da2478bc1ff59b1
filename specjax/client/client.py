"""A client: a drafter on this machine, and its target on a server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.typing import DTypeLike

from specjax import text
from specjax.client.device import ClientDevice
from specjax.client.events import TextReport
from specjax.client.exchange import Exchange, ExchangeRequest, check_params
from specjax.client.journal import Journal
from specjax.client.link import Link, WebSocketLink
from specjax.client.private import PrivateWriter, split
from specjax.client.writer import Patience, Writer
from specjax.drafters.base import Drafter
from specjax.drafters.methods.mixture_of_attentions import with_told
from specjax.drafters.registry import load_drafter
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, SampledTree, StaticTree
from specjax.errors import InputError, check_options
from specjax.models import hub
from specjax.models.transformer import Target
from specjax.sampling_params import SamplingParams
from specjax.templates import Settings, with_template
from specjax.wire.arrays import PRECISIONS, Precision

DEPTHS = (2, 4, 8, 16)
"""Depths of drafts that a client chooses among, where the shape of its drafts allows it."""

USUAL_CAPACITY = 4096
"""Most tokens of a text, unless asked for otherwise."""


class Client:
    """A drafter, and the way to a server that has its target. Made by `connect`.

    Attributes:
        device: the drafter, with the parts of the target that it needs.
        tokenizer: None: prompts are token ids.
        patience: how long it waits for what.
        report: of the newest text.

    Examples:
        >>> from specjax.client import connect
        >>> client = connect("ws://localhost:8000", specjax.PromptLookup(draft=2), target, capacity=32)
        >>> for event in client.stream([5, 3, 1, 5, 3, 1, 5], max_new_tokens=2, is_offline=True):  # without any server
        ...     print(event)
        ProvisionalEvent(tokens=(3,), text='')
        ProvisionalEvent(tokens=(1,), text='')
        >>> client.report.finish_reason
        'offline'
    """

    def __init__(
        self,
        device: ClientDevice,
        make_link: Callable[[], Link],
        *,
        tokenizer: Any = None,
        patience: Patience = Patience(),
        precision: Precision = "float16",
        fingerprints: tuple[str, str] = ("", ""),
    ) -> None:
        """``make_link`` gives a link of its own to each text. ``fingerprints`` are of target and drafter; the server refuses
        others than its own, unless they are empty."""
        self.device, self.tokenizer, self.patience = device, tokenizer, patience
        self.report = TextReport()
        self._make_link, self._fingerprints = make_link, fingerprints
        self._precision: Precision = precision

    def stream(
        self,
        prompt: str | text.Messages | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        private: Sequence[str] = (),
        journal: str | Path | None = None,
        is_offline: bool = False,
        **stated: Any,
    ) -> Writer | PrivateWriter:
        """Write a text. Iterate over what is returned for its events; its ``report`` says what the text came to.

        What is committed is exactly the target's text for these settings and this seed, whatever happens to the connection: the
        text that `specjax.serving.Engine.submit` gives. What is provisional the drafter has written alone.

        Args:
            prompt: text, a chat, or token ids.
            params: the sampling parameters.
            stop: a string, or several, before the first of which the text ends.
            private: strings of the prompt that the server must not see. The drafter sees them. Nothing that follows is
                verified: all of the text is provisional. See `specjax.client.private`.
            journal: file in which the text is kept as far as it is committed. Where it is there, the text goes on from it.
            is_offline: do not ask the server: the drafter writes all of the text, provisionally.
            stated: the fields of `specjax.SamplingParams` by name, such as ``max_new_tokens=64``, in place of ``params`` or
                over them.

        Raises:
            InputError: an argument cannot be used; names it, its value and what to give instead.
        """
        config = self.device.target.config
        params = SamplingParams.of(params, stated, function=self.stream)
        check_params(params)
        params.options().check(config, 1)
        stop = text.check_stop(stop)
        if stop and self.tokenizer is None:
            raise InputError("stop: a client without a tokenizer has no text to look for it in; give tokenizer=...")
        private = private if isinstance(private, str) else tuple(private)
        tokens = self.encode(prompt)
        room = self.device.capacity - params.max_new_tokens
        if len(tokens) > room:
            raise InputError(
                f"prompt ({len(tokens)} tokens) plus max_new_tokens={params.max_new_tokens}: this client has room for "
                f"{self.device.capacity}; shorten the prompt, ask for fewer, or give connect(capacity=...)"
            )
        target, drafter = self._fingerprints
        request = ExchangeRequest(
            prompt=tuple(tokens),
            params=params,
            target=target,
            drafter=drafter,
            precision=self._precision,
        )
        given: dict[str, Any] = {"patience": self.patience, "tokenizer": self.tokenizer, "stop": stop}
        writer: Writer | PrivateWriter
        if private:
            if journal is not None or not isinstance(prompt, str):
                raise InputError("private: give a prompt that is text, and no journal: nothing of this text is committed")
            hidden = split(self.tokenizer, prompt, tokens, private)
            writer = PrivateWriter(request, hidden, self.device, self._make_link(), is_offline=is_offline, **given)
        else:
            kept = None if journal is None else Journal(Path(journal))
            exchange = Exchange(request) if kept is None else kept.open(request)
            if kept is not None:
                kept.keep(exchange)  # what cannot be written is refused now
            is_chat = not isinstance(prompt, str) and any(isinstance(each, Mapping) for each in prompt)
            given |= {"journal": kept, "is_chat": is_chat}
            writer = Writer(exchange, self.device, self._make_link(), is_offline=is_offline, **given)
        self.report = writer.report
        return writer

    def generate(
        self, prompt: str | text.Messages | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> TextReport:
        """Return the whole text. Arguments as of `stream`."""
        check_options("generate", options, self.stream, *(field.name for field in fields(SamplingParams)))
        writer = self.stream(prompt, params, **options)
        for _ in writer:
            pass
        return writer.report

    def encode(self, prompt: str | text.Messages | Sequence[int]) -> list[int]:
        """The token ids of a prompt."""
        vocabulary = self.device.target.config.vocab_size
        if isinstance(prompt, str) or any(not isinstance(each, int | np.integer) for each in prompt):
            if self.tokenizer is None:
                raise InputError("prompt: without a tokenizer give token ids; --target-parts of `specjax convert` has one")
            is_chat = not isinstance(prompt, str)
            tokens = text.encode_chat(self.tokenizer, prompt) if is_chat else text.encode(self.tokenizer, prompt)  # pyright: ignore[reportArgumentType]
        else:
            tokens = [int(token) for token in prompt]  # pyright: ignore[reportArgumentType]
        if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
            raise InputError(f"prompt: must have at least one token, with ids from 0 to {vocabulary - 1}")
        return tokens


def connect(
    server: str,
    drafter: str | Drafter,
    target_parts: str | Path | Target,
    *,
    api_key: str | None = None,
    certificate: str | Path | None = None,
    draft: DraftShape | int | str | None = None,
    told: Literal["summaries", "entries"] | None = None,
    precision: Precision = "float16",
    capacity: int | None = None,
    dtype: DTypeLike | None = None,
    tokenizer: Any = None,
    chat_template: str | Path = "",
    chat_template_kwargs: str | Settings = "",
    patience: Patience = Patience(),
    make_link: Callable[[], Link] | None = None,
) -> Client:
    """A client of a server that was started with ``specjax serve --drafts``. It is connected when a text is asked for.

    Args:
        server: ``ws://HOST:PORT``, or ``wss://HOST:PORT`` where the server has a certificate.
        drafter: as `specjax.load` takes it: ``moa:DIRECTORY``, or one that is loaded.
        target_parts: directory that ``specjax convert --client-parts`` has written; or a target.
        api_key: the server's, where it asks for one.
        certificate: file with the certificates to trust, in place of the system's.
        draft: the shape of its drafts; the depth is chosen as the network asks for it. None: the drafter's own.
        told: of Mixture of Attentions, what comes down; as the server was started. None: as the drafter has it.
        precision: of the numbers that come down.
        capacity: most tokens of a text; None: what the models have positions for, at most `USUAL_CAPACITY`.
        dtype: of the params, as in `specjax.load`.
        tokenizer: for a target that is loaded.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template of every chat is given beside the messages, as in `specjax.load`.
        patience: how long to wait for what.
        make_link: of each text's way to the server, in place of a WebSocket.

    Raises:
        InputError: an argument cannot be used; names it, its value and what to give instead.

    Examples:
        >>> from specjax.client import connect
        >>> drafter = specjax.DraftModel.init(target, jax.random.key(1), num_layers=1, draft=2)
        >>> client = connect("ws://localhost:8000", drafter, target, capacity=32)
        >>> report = client.generate([5, 3, 1], max_new_tokens=4, is_offline=True)
        >>> len(report.provisional_tokens), report.tokens  # nothing was verified
        (4, ())
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision={precision!r}: must be {', '.join(PRECISIONS)}")
    web_socket = partial(WebSocketLink, server, api_key, certificate)
    web_socket()  # an address that is none is refused now
    if not isinstance(target_parts, Target):
        directory = hub.locate(target_parts)
        if tokenizer is None and text.has_tokenizer(directory):
            tokenizer = text.load_tokenizer(directory)
        target_parts = Target.from_pretrained(directory, dtype=dtype)
    if tokenizer is not None:
        tokenizer = with_template(tokenizer, str(chat_template), chat_template_kwargs)
    elif chat_template or chat_template_kwargs:
        raise InputError("chat_template: target_parts has no tokenizer for it; see --target-parts of `specjax convert`")
    shape = None if draft is None else as_shape(draft)
    if isinstance(drafter, str):
        own = load_drafter(drafter, shape, target_parts.config, dtype, tokenizer=tokenizer)
    else:
        own = drafter if shape is None else drafter.replace(draft=shape)  # pyright: ignore[reportAttributeAccessIssue]
    if told is not None:
        own = with_told(own, told)
    positions = [target_parts.config.max_positions, own.max_positions, capacity or USUAL_CAPACITY]
    shapes = of_depths(own.draft_shape)
    device = ClientDevice(target_parts, own, shapes, min(each for each in positions if each is not None))
    return Client(
        device,
        web_socket if make_link is None else make_link,
        tokenizer=tokenizer,
        patience=patience,
        precision=precision,
        fingerprints=(target_parts.fingerprint(), own.fingerprint()),
    )


def of_depths(shape: DraftShape) -> list[DraftShape]:
    """``shape``, and the same shallower and deeper: what a client chooses among.

    Examples:
        >>> from specjax.client.client import of_depths
        >>> [each.depth for each in of_depths(specjax.Chain(5))]
        [2, 4, 5, 8, 16]
    """
    made: dict[int, DraftShape] = {shape.depth: shape}
    for depth in DEPTHS:
        if isinstance(shape, Chain):
            made.setdefault(depth, replace(shape, length=depth))
        elif isinstance(shape, DynamicTree):
            offered = shape.top_k + (depth - 1) * shape.top_k**2
            nodes = min(shape.nodes, offered + 1)
            if depth < nodes:
                made.setdefault(depth, replace(shape, depth=depth, nodes=nodes))
        elif isinstance(shape, StaticTree) and depth < shape.depth:
            made.setdefault(depth, StaticTree(tuple(path for path in shape.choices if len(path) <= depth)))
        elif isinstance(shape, SampledTree) and depth < shape.depth:
            made.setdefault(depth, SampledTree(shape.widths[:depth]))
    return [made[depth] for depth in sorted(made)]
