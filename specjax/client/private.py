"""Prompts with private strings, which only the drafter sees.

The prompt is tokenized once. Tokens that contain a character of a private string are *private*, all
others are *safe*. The client sends the safe tokens to the server, without gaps, and the server
returns their hidden states. On this machine, the drafter appends these states at the positions that
the safe tokens have in the whole prompt, and simulates the states of the private tokens. So its
self-attention sees the whole prompt (arXiv 2410.03804, section 3.4).

The output depends on the private tokens, which the server does not know. So it cannot verify the
output: all of it is provisional, and as good as the drafter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.client.device import ClientDevice
from specjax.client.events import TextEvent, TextReport
from specjax.client.exchange import Exchange, ExchangeRequest, FeaturesReceived
from specjax.client.link import Link
from specjax.client.writer import Patience, Writer
from specjax.errors import InputError
from specjax.models.rope import inverse_frequencies, rotate, rotations
from specjax.models.transformer import Target

WAIT = 30.0
"""The seconds to wait for the hidden states of the safe tokens, unless `Patience.server` is set.

After that, the drafter simulates the states of the safe tokens as well.
"""


def split(tokenizer: Any, prompt: str, tokens: Sequence[int], private: Sequence[str]) -> list[bool]:
    """Return for each token of a prompt whether it is private.

    Args:
        tokenizer: a fast tokenizer, which knows the characters of each token.
        prompt: the text of the prompt.
        tokens: the token ids of the prompt.
        private: the private strings. Every occurrence of each of them is private.

    Raises:
        InputError: A string is not in the prompt, or the characters of each token are unknown.

    Examples:
        >>> from specjax.client.private import split
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> prompt = 'key = "secret"'
        >>> tokens = specjax.text.encode(tokenizer, prompt)
        >>> is_private = split(tokenizer, prompt, tokens, private=["secret"])
        >>> "secret" in tokenizer.decode([t for t, hide in zip(tokens, is_private) if not hide])
        False
    """
    # No message of this module shows a private string: messages end up in logs.
    if isinstance(private, str) or not all(
        isinstance(string, str) and string for string in private
    ):
        raise InputError("private: give a sequence of strings that are not empty")
    private = tuple(private)
    is_private = np.zeros(len(prompt) + 1, bool)
    for string in private:
        start = prompt.find(string)
        if start < 0:
            raise InputError(
                "private: one of the strings is not in the prompt, so it would not be hidden; check"
                " the strings"
            )
        while start >= 0:
            is_private[start : start + len(string)] = True
            start = prompt.find(string, start + 1)
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "private: this tokenizer does not say which characters its tokens have; give a fast one"
        )
    for special in (True, False):
        encoding = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=special)
        if list(encoding["input_ids"]) == list(tokens):
            return _touched(is_private, encoding["offset_mapping"])
    raise InputError(
        "private: the prompt's tokens are not those of its text alone; give plain text"
    )


def _touched(is_private: np.ndarray, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each token whether it contains a private character.

    Some tokenizers leave the space before a word out of the offsets of its token. So the characters
    of a token begin where those of the previous token end.
    """
    is_touched, previous_end = [], 0
    for begin, end in offsets:
        is_touched.append(bool(is_private[min(begin, previous_end) : max(end, previous_end)].any()))
        previous_end = max(end, previous_end)
    return is_touched


class PrivateWriter:
    """The generation of one text whose prompt is partly private. Iterate over it for the events.

    All events are provisional.

    Attributes:
        report: the report on the text so far.
    """

    def __init__(
        self,
        request: ExchangeRequest,
        is_private: Sequence[bool],
        device: ClientDevice,
        link: Link,
        *,
        patience: Patience = Patience(),
        tokenizer: Any = None,
        stop: Sequence[str] = (),
        is_offline: bool = False,
    ) -> None:
        """Start a text. ``is_private`` has one flag per prompt token; for the rest see `Writer`."""
        if not any(is_private):
            raise InputError(
                "private: no token of the prompt is private, so all of it would be sent; check the"
                " strings"
            )
        self._is_private, self._device, self._is_offline = list(is_private), device, is_offline
        safe = [token for token, hide in zip(request.prompt, is_private, strict=True) if not hide]
        self._listener: _Listener | None = None
        if safe and not is_offline:
            # The server sends no hidden states of the last token of a prompt. So the last safe
            # token is sent twice, and `_append_prompt` ignores the second one.
            params = replace(request.params, max_new_tokens=1)
            safe_request = replace(request, prompt=(*safe, safe[-1]), params=params)
            wait = replace(patience, server=WAIT if patience.server is None else patience.server)
            self._listener = _Listener(Exchange(safe_request), device, link, patience=wait)
        options: dict[str, Any] = {"patience": patience, "tokenizer": tokenizer, "stop": stop}
        self._writer = Writer(Exchange(request), device, link, is_offline=True, **options)

    @property
    def report(self) -> TextReport:
        """The report on the text so far."""
        return self._writer.report

    def __iter__(self) -> Iterator[TextEvent]:
        """Yield the events until the text ends."""
        arrays, count = {}, 0
        if self._listener is not None:
            for _ in self._listener:
                pass
            arrays, count = self._listener.features()
            listened = self._listener.report
            self.report.bytes_up, self.report.bytes_down = listened.bytes_up, listened.bytes_down
        self._append_prompt(arrays, count)
        yield from self._writer

    def _append_prompt(self, features: dict[str, np.ndarray], count: int) -> None:
        """Append the prompt to the drafter's state.

        Args:
            features: ``[count, ...]`` hidden states of the first ``count`` safe tokens. Those of
                all other tokens are simulated.
            count: see ``features``.
        """
        speculation, tokens = self._writer.speculation, self._writer.exchange.tokens
        safe_indices = np.cumsum(~np.array(self._is_private)) - 1
        # The last token is left out: it is the root of the first draft.
        has_features = [
            not hide and index < count
            for hide, index in zip(self._is_private, safe_indices, strict=True)
        ][:-1]
        for is_received, run in groupby(
            range(len(has_features)), key=lambda position: has_features[position]
        ):
            positions = list(run)
            piece = [tokens[position] for position in positions]
            following = [tokens[position + 1] for position in positions]
            if is_received:
                # The server has seen the safe tokens without the private ones between them, and so
                # at earlier positions.
                indices = safe_indices[positions]
                shift = np.array(positions) - indices
                arrays = {name: array[indices] for name, array in features.items()}
                arrays = moved(self._device.target, arrays, shift)
                speculation.append_remote(piece, following, arrays)
            else:
                speculation.append_unverified(piece, following)


class _Listener(Writer):
    """A writer that collects the hidden states of a prompt, and drafts nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received: list[FeaturesReceived] = []

    def features(self) -> tuple[dict[str, np.ndarray], int]:
        """Return the hidden states by name, ``[T, …]`` each, and the number of tokens T."""
        names = self._received[0].arrays if self._received else {}
        arrays = {
            name: np.concatenate([event.arrays[name] for event in self._received]) for name in names
        }
        return arrays, sum(len(event.tokens) for event in self._received)

    def _is_over(self) -> bool:
        return self.exchange.phase == "ready" or super()._is_over()

    def _draft_ahead(self) -> bool:
        return False

    def _append_features(self, event: FeaturesReceived) -> None:
        self._received.append(event)


def moved(
    target: Target, arrays: dict[str, np.ndarray], shift: np.ndarray
) -> dict[str, np.ndarray]:
    """Return hidden states and KV as if each token stood ``shift [T]`` positions further on.

    Keys are rotated, all other arrays stay: RoPE by p positions, then by s more, gives the key at
    position p + s.

    Raises:
        InputError: The target's layers have no keys that can be rotated.
    """
    shifted = dict(arrays)
    for name, array in arrays.items():
        if (layer := _layer_of_keys(name)) is not None:
            shifted[name] = _rotated(target, layer, array, shift)
        elif name == "entries":  # the KV of all layers: for each head its key, then its value
            layers = []
            for layer in range(array.shape[1]):
                heads, dim = target.config.entry_parts(layer)[0]
                keys, values = np.split(array[:, layer].reshape(-1, heads, 2 * dim), 2, axis=-1)
                both = np.concatenate([_rotated(target, layer, keys, shift), values], axis=-1)
                layers.append(both.reshape(len(array), -1))
            shifted[name] = np.stack(layers, axis=1)
    return shifted


def _layer_of_keys(name: str) -> int | None:
    """Return N for an array named ``layerN.0``, which has the keys of layer N; else None.

    `specjax.drafters.base.remote_entry_arrays` gives these names.
    """
    layer, _, part = name.partition(".")
    return int(layer.removeprefix("layer")) if layer.startswith("layer") and part == "0" else None


def _rotated(target: Target, layer: int, keys: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Rotate the ``keys [T, heads, dim]`` of a layer ``shift [T]`` positions further."""
    config = target.config.of_layer(layer)
    if config.mla is not None:
        raise InputError(
            "private: target layer inference (tli) does not support a target that caches latents"
            " (MLA)"
        )
    # The keys have yarn's factor already, and must not get it twice.
    _, factor = inverse_frequencies(config.rope, config.head_dim)
    cos, sin, _ = rotations(config.rope, config.head_dim, jnp.asarray(shift, jnp.int32)[None])
    return np.asarray(rotate(jnp.asarray(keys)[None], cos / factor, sin / factor)[0])
