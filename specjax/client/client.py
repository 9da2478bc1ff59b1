"""The client: a drafter on this machine, and its target on a server."""

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
from specjax.drafters.corpus import files_for
from specjax.drafters.methods.mixture_of_attentions import with_told
from specjax.drafters.registry import load_drafter
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, SampledTree, StaticTree
from specjax.errors import InputError, check_options
from specjax.models import hub
from specjax.models.transformer import Target
from specjax.sampling_params import SamplingParams
from specjax.templates import Settings, check_is_chat, with_template
from specjax.wire.arrays import PRECISIONS, Precision

DEPTHS = (2, 4, 8, 16)
"""The draft depths that a client chooses from, if the shape of its drafts allows them."""

USUAL_CAPACITY = 4096
"""The default maximum number of tokens of a text, prompt and output."""


class Client:
    """A drafter and the connection to a server that has its target. `connect` makes one.

    Attributes:
        device: the drafter, with the parts of the target that it needs.
        tokenizer: the tokenizer; None if all prompts are token ids.
        patience: the timeouts.
        report: the report on the newest text.

    Examples:
        >>> from specjax.client import connect
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> client = connect("ws://localhost:8000", drafter, target, capacity=32)
        >>> prompt = [5, 3, 1, 5, 3, 1, 5]
        >>> for event in client.stream(prompt, max_new_tokens=2, is_offline=True):  # no server
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
        """Make a client.

        Args:
            device: the drafter, with the parts of the target that it needs.
            make_link: makes a new link for each text.
            tokenizer: the tokenizer; None if all prompts are token ids.
            patience: the timeouts.
            precision: the format of the hidden states that the server sends.
            fingerprints: the fingerprints of target and drafter. The server refuses fingerprints
                that differ from its own; an empty one is not compared.
        """
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
        chat_template_kwargs: Settings | None = None,
        **stated: Any,
    ) -> Writer | PrivateWriter:
        """Generate a text. Iterate over the returned writer for events; ``report`` has the result.

        The committed text is exactly the target's text for these sampling parameters and this seed,
        whatever happens to the connection. `specjax.serving.Engine.submit` gives the same text.
        Provisional text comes from the drafter alone, and a grammar does not apply to it.

        Args:
            prompt: text, a chat, or token ids.
            params: the sampling parameters.
            stop: a string or several. The text ends before the first one that occurs.
            private: strings of the prompt that the server must not see. The drafter sees them.
                The output is not verified, so all of it is provisional. See
                `specjax.client.private`.
            journal: the file that stores the committed text. If it exists, the text continues
                from it.
            is_offline: whether to generate all of the text with the drafter, provisionally, and
                never contact the server.
            chat_template_kwargs: variables for the template of this chat. They override those of
                `connect`.
            stated: fields of `specjax.SamplingParams` by name, such as ``max_new_tokens=64``. They
                replace those of ``params``.

        Raises:
            InputError: An argument is invalid. The message names it, its value and the remedy.
        """
        config = self.device.target.config
        params = SamplingParams.of(params, stated, function=self.stream)
        check_params(params)
        params.options().check(config, 1)
        stop = text.check_stop(stop)
        if stop and self.tokenizer is None:
            raise InputError(
                "stop: a client without a tokenizer has no text to search; give tokenizer=..."
            )
        private = private if isinstance(private, str) else tuple(private)
        if params.grammar is not None and (private or is_offline):
            raise InputError(
                f"grammar: the server applies it, and with {'private' if private else 'is_offline'}"
                " the server verifies nothing; leave one of them out"
            )
        tokens = self.encode(prompt, chat_template_kwargs)
        room = self.device.capacity - params.max_new_tokens
        if len(tokens) > room:
            raise InputError(
                f"prompt ({len(tokens)} tokens) plus max_new_tokens={params.max_new_tokens}: this"
                f" client has room for {self.device.capacity}; shorten the prompt, lower"
                " max_new_tokens, or give connect(capacity=...)"
            )
        target, drafter = self._fingerprints
        request = ExchangeRequest(
            prompt=tuple(tokens),
            params=params,
            target=target,
            drafter=drafter,
            precision=self._precision,
        )
        options: dict[str, Any] = {
            "patience": self.patience,
            "tokenizer": self.tokenizer,
            "stop": stop,
        }
        writer: Writer | PrivateWriter
        if private:
            if journal is not None or not isinstance(prompt, str):
                raise InputError(
                    "private: give a prompt that is text, and no journal, since nothing is"
                    " committed"
                )
            is_private = split(self.tokenizer, prompt, tokens, private)
            writer = PrivateWriter(
                request,
                is_private,
                self.device,
                self._make_link(),
                is_offline=is_offline,
                **options,
            )
        else:
            store = None if journal is None else Journal(Path(journal))
            exchange = Exchange(request) if store is None else store.open(request)
            if store is not None:
                # Fail now, not after the first tokens, if the file cannot be written.
                store.keep(exchange)
            is_chat = not isinstance(prompt, str) and any(
                isinstance(message, Mapping) for message in prompt
            )
            options |= {"journal": store, "is_chat": is_chat}
            writer = Writer(
                exchange, self.device, self._make_link(), is_offline=is_offline, **options
            )
        self.report = writer.report
        return writer

    def generate(
        self,
        prompt: str | text.Messages | Sequence[int],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> TextReport:
        """Generate a text and return its report. The arguments are those of `stream`."""
        check_options(
            "generate", options, self.stream, *(field.name for field in fields(SamplingParams))
        )
        writer = self.stream(prompt, params, **options)
        for _ in writer:
            pass
        return writer.report

    def encode(
        self,
        prompt: str | text.Messages | Sequence[int],
        chat_template_kwargs: Settings | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: text, a chat, or token ids.
            chat_template_kwargs: variables for the chat template, as for `stream`.
        """
        vocabulary = self.device.target.config.vocab_size
        if isinstance(prompt, str) or any(
            not isinstance(part, int | np.integer) for part in prompt
        ):
            if self.tokenizer is None:
                raise InputError(
                    "prompt: without a tokenizer give token ids; --target-parts of `specjax"
                    " convert` has one"
                )
            if isinstance(prompt, str):
                tokens = text.encode(
                    self.tokenizer, prompt, chat_template_kwargs=chat_template_kwargs
                )
            else:
                tokens = text.encode_chat(self.tokenizer, prompt, chat_template_kwargs)  # pyright: ignore[reportArgumentType]
        else:
            check_is_chat(False, "", chat_template_kwargs or {})
            tokens = [int(token) for token in prompt]  # pyright: ignore[reportArgumentType]
        if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
            raise InputError(
                f"prompt: it must have at least one token, with ids from 0 to {vocabulary - 1}"
            )
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
    corpus: str | Path | Sequence[str | Path] = (),
    tokenizer: Any = None,
    chat_template: str | Path = "",
    chat_template_kwargs: str | Settings = "",
    patience: Patience = Patience(),
    make_link: Callable[[], Link] | None = None,
) -> Client:
    """Return a client of a server that was started with ``specjax serve --drafts``.

    The client connects when it generates a text.

    Args:
        server: ``ws://HOST:PORT``, or ``wss://HOST:PORT`` if the server has a certificate.
        drafter: the drafter's name as in `specjax.load`, such as ``moa:DIRECTORY``, or a loaded
            drafter.
        target_parts: a directory that ``specjax convert --client-parts`` has written, or a target.
        api_key: the server's API key, if it requires one.
        certificate: a file with the certificates to trust, instead of the system's.
        draft: the shape of the drafts; None for the drafter's own. The client adapts the depth to
            the network.
        told: the hidden states that a Mixture of Attentions drafter receives. It must match the
            server's option. None for the drafter's own.
        precision: the format of the hidden states that the server sends.
        capacity: the maximum number of tokens of a text, prompt and output. None for the number of
            positions of the models, at most `USUAL_CAPACITY`.
        dtype: the type of the weights, as in `specjax.load`.
        corpus: text files that the drafter "suffix" drafts from, as in `specjax.load`. They stay on
            this machine; the server sees what is drafted from them.
        tokenizer: the tokenizer of a loaded target.
        chat_template: a file with a Jinja chat template, instead of the tokenizer's own.
        chat_template_kwargs: arguments of the chat template beside the messages, as in
            `specjax.load`.
        patience: the timeouts.
        make_link: makes the connection of each text, instead of a WebSocket.

    Raises:
        InputError: An argument is invalid. The message names it, its value and the remedy.

    Examples:
        >>> from specjax.client import connect
        >>> drafter = specjax.DraftModel.init(target, jax.random.key(1), num_layers=1, draft=2)
        >>> client = connect("ws://localhost:8000", drafter, target, capacity=32)
        >>> report = client.generate([5, 3, 1], max_new_tokens=4, is_offline=True)
        >>> len(report.provisional_tokens), report.tokens  # nothing was verified
        (4, ())
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision={precision!r}: it must be one of {', '.join(PRECISIONS)}")
    web_socket = partial(WebSocketLink, server, api_key, certificate)
    web_socket()  # raise now if the address is invalid
    if not isinstance(target_parts, Target):
        directory = hub.locate(target_parts)
        if tokenizer is None and text.has_tokenizer(directory):
            tokenizer = text.load_tokenizer(directory)
        target_parts = Target.from_pretrained(directory, dtype=dtype)
    if tokenizer is not None:
        tokenizer = with_template(tokenizer, str(chat_template), chat_template_kwargs)
    elif chat_template or chat_template_kwargs:
        raise InputError(
            "chat_template: target_parts has no tokenizer; see --target-parts of `specjax convert`"
        )
    shape, files = None if draft is None else as_shape(draft), files_for(corpus, drafter)
    if isinstance(drafter, str):
        loaded = load_drafter(
            drafter, shape, target_parts.config, dtype, tokenizer=tokenizer, corpus=files
        )
    else:
        loaded = drafter if shape is None else drafter.replace(draft=shape)  # pyright: ignore[reportAttributeAccessIssue]
    if told is not None:
        loaded = with_told(loaded, told)
    limits = [target_parts.config.max_positions, loaded.max_positions, capacity or USUAL_CAPACITY]
    shapes = of_depths(loaded.draft_shape)
    device = ClientDevice(
        target_parts, loaded, shapes, min(limit for limit in limits if limit is not None)
    )
    return Client(
        device,
        web_socket if make_link is None else make_link,
        tokenizer=tokenizer,
        patience=patience,
        precision=precision,
        fingerprints=(target_parts.fingerprint(), loaded.fingerprint()),
    )


def of_depths(shape: DraftShape) -> list[DraftShape]:
    """Return the shape and its variants of all `DEPTHS` that it allows, by ascending depth.

    Examples:
        >>> from specjax.client.client import of_depths
        >>> [shape.depth for shape in of_depths(specjax.Chain(5))]
        [2, 4, 5, 8, 16]
    """
    shapes: dict[int, DraftShape] = {shape.depth: shape}
    for depth in DEPTHS:
        if isinstance(shape, Chain):
            shapes.setdefault(depth, replace(shape, length=depth))
        elif isinstance(shape, DynamicTree):
            candidates = shape.top_k + (depth - 1) * shape.top_k**2
            nodes = min(shape.nodes, candidates + 1)  # with the root
            if depth < nodes:
                shapes.setdefault(depth, replace(shape, depth=depth, nodes=nodes))
        elif isinstance(shape, StaticTree) and depth < shape.depth:
            shapes.setdefault(
                depth, StaticTree(tuple(path for path in shape.choices if len(path) <= depth))
            )
        elif isinstance(shape, SampledTree) and depth < shape.depth:
            shapes.setdefault(depth, SampledTree(shape.widths[:depth]))
    return [shapes[depth] for depth in sorted(shapes)]
