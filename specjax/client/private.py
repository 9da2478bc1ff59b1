"""Prompts of which the server sees a part: what is private stays with the drafter.

The prompt is cut into tokens once. Those that have any character of a private string are *private*, the others *safe*. The
safe ones go to the server, one after the other as if nothing stood between them, and it tells what the drafter needs of them.
On this machine the drafter hears that at the tokens' own places, and assumes the private ones in between: its self-attention
sees the whole prompt (arXiv 2410.03804, section 3.4).

What follows a private token depends on it, and the server does not know it: so nothing of the text is verified. All of it is
provisional, as good as the drafter is.
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
"""Seconds to wait for what the server tells of the safe tokens, unless `Patience.server` says otherwise. Without it the drafter
goes by the tokens alone."""


def split(tokenizer: Any, prompt: str, tokens: Sequence[int], private: Sequence[str]) -> list[bool]:
    """Of each of a prompt's ``tokens``, whether it is private.

    Args:
        tokenizer: a fast one, which knows the characters of each token.
        prompt: the text.
        tokens: its tokens.
        private: strings; each of their occurrences is private.

    Raises:
        InputError: a string is not in the prompt, or it is not known which characters a token has.

    Examples:
        >>> from specjax.client.private import split
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> prompt = 'key = "secret"'
        >>> tokens = specjax.text.encode(tokenizer, prompt)
        >>> hidden = split(tokenizer, prompt, tokens, private=["secret"])
        >>> "secret" in tokenizer.decode([t for t, own in zip(tokens, hidden) if not own])
        False
    """
    if isinstance(private, str) or not all(isinstance(each, str) and each for each in private):
        raise InputError("private: give a sequence of strings that are not empty")  # they are not to be shown
    private = tuple(private)
    is_private = np.zeros(len(prompt) + 1, bool)
    for each in private:
        start = prompt.find(each)
        if start < 0:
            raise InputError("private: one of the strings is not in the prompt, and what is not found would be sent; check it")
        while start >= 0:
            is_private[start : start + len(each)] = True
            start = prompt.find(each, start + 1)
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("private: this tokenizer does not say which characters its tokens have; give a fast one")
    for special in (True, False):
        said = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=special)
        if list(said["input_ids"]) == list(tokens):
            return _touched(is_private, said["offset_mapping"])
    raise InputError("private: the prompt's tokens are not those of its text alone; give plain text")


def _touched(is_private: np.ndarray, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Of each token, whether it has any private character.

    Some tokenizers count no space to a token that begins with one: so each token's characters begin where those of the one
    before have ended.
    """
    found, before = [], 0
    for begin, end in offsets:
        found.append(bool(is_private[min(begin, before) : max(end, before)].any()))
        before = max(end, before)
    return found


class PrivateWriter:
    """Writes one text of which the server sees a part of the prompt. Iterate over it for the events, which are provisional.

    Attributes:
        report: what it took.
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
        """Of each token of the prompt ``is_private``; the others as of `Writer`."""
        if not any(is_private):
            raise InputError("private: no token of the prompt is private, and all of it would be sent; check the strings")
        self._is_private, self._device, self._is_offline = list(is_private), device, is_offline
        safe = [token for token, own in zip(request.prompt, is_private, strict=True) if not own]
        # Of a text's last token nothing is told before it goes on. So one more is sent, which is not heard.
        asked = replace(request, prompt=(*safe, safe[-1]), params=replace(request.params, max_new_tokens=1)) if safe else None
        self._asking: _Listener | None = None
        if asked is not None and not is_offline:
            wait = replace(patience, server=WAIT if patience.server is None else patience.server)
            self._asking = _Listener(Exchange(asked), device, link, patience=wait)
        given: dict[str, Any] = {"patience": patience, "tokenizer": tokenizer, "stop": stop}
        self._writer = Writer(Exchange(request), device, link, is_offline=True, **given)

    @property
    def report(self) -> TextReport:
        """What it took."""
        return self._writer.report

    def __iter__(self) -> Iterator[TextEvent]:
        """The events."""
        told, count = {}, 0
        if self._asking is not None:
            for _ in self._asking:
                pass
            told, count = self._asking.told()
            taken, own = self._asking.report, self.report
            own.bytes_up, own.bytes_down = taken.bytes_up, taken.bytes_down
        self._hear(told, count)
        yield from self._writer

    def _hear(self, told: dict[str, np.ndarray], count: int) -> None:
        """Let the drafter know the prompt: what was told of the first ``count`` safe tokens, and all the others assumed."""
        speculation, tokens = self._writer.speculation, self._writer.exchange.tokens
        # The last token is the root of what is drafted first.
        numbers = np.cumsum(~np.array(self._is_private)) - 1
        known = [not own and number < count for own, number in zip(self._is_private, numbers, strict=True)][:-1]
        for is_told, run in groupby(range(len(known)), key=lambda place: known[place]):
            places = list(run)
            piece, following = [tokens[place] for place in places], [tokens[place + 1] for place in places]
            if is_told:
                at = numbers[places]
                arrays = {name: array[at] for name, array in told.items()}
                shift = np.array(places) - at
                speculation.append_remote(piece, following, moved(self._device.target, arrays, shift))
            else:
                speculation.append_unverified(piece, following)


class _Listener(Writer):
    """Has a prompt read, and keeps what is told of it. It drafts nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._told: list[FeaturesReceived] = []

    def told(self) -> tuple[dict[str, np.ndarray], int]:
        """What was told, ``[T, …]`` each, of the first T tokens."""
        names = self._told[0].arrays if self._told else {}
        arrays = {name: np.concatenate([each.arrays[name] for each in self._told]) for name in names}
        return arrays, sum(len(each.tokens) for each in self._told)

    def _is_over(self) -> bool:
        return self.exchange.phase == "ready" or super()._is_over()

    def _draft_on(self) -> bool:
        return False

    def _hear(self, news: FeaturesReceived) -> None:
        self._told.append(news)


def moved(target: Target, arrays: dict[str, np.ndarray], shift: np.ndarray) -> dict[str, np.ndarray]:
    """What was told of tokens as if each stood ``shift [T]`` places further on: keys are turned, all else is as it was.

    A key that RoPE has turned by p positions and that is turned by s more is the key at p + s.

    Raises:
        InputError: the target's layers have no such keys.
    """
    after = dict(arrays)
    for name, array in arrays.items():
        if (layer := _layer_of_keys(name)) is not None:
            after[name] = _turned(target, layer, array, shift)
        elif name == "entries":  # of all layers: by head the key, then the value
            layers = []
            for number in range(array.shape[1]):
                heads, dim = target.config.entry_parts(number)[0]
                keys, values = np.split(array[:, number].reshape(-1, heads, 2 * dim), 2, axis=-1)
                both = np.concatenate([_turned(target, number, keys, shift), values], axis=-1)
                layers.append(both.reshape(len(array), -1))
            after[name] = np.stack(layers, axis=1)
    return after


def _layer_of_keys(name: str) -> int | None:
    """Return the layer whose keys are the array ``layerN.0`` (`specjax.drafters.base.remote_entry_arrays`); None: no keys."""
    layer, _, part = name.partition(".")
    return int(layer.removeprefix("layer")) if layer.startswith("layer") and part == "0" else None


def _turned(target: Target, layer: int, keys: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The ``keys [T, heads, dim]`` of a layer, ``shift [T]`` places further on."""
    config = target.config.of_layer(layer)
    if config.mla is not None:
        raise InputError("private: target layer inference (tli) with a target that remembers latents (MLA) is not made for it")
    _, factor = inverse_frequencies(config.rope, config.head_dim)
    cos, sin, _ = rotations(config.rope, config.head_dim, jnp.asarray(shift, jnp.int32)[None])
    return np.asarray(rotate(jnp.asarray(keys)[None], cos / factor, sin / factor)[0])
