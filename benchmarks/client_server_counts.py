"""Counts of a client and a server that need no clock: bytes, acceptance and agreement.

The client's own code does the work, in one process and without a socket:
`specjax.client.device.ClientDevice` receives the target's hidden states of an existing text, and
drafts after it.
"""

from collections.abc import Mapping
from functools import partial
from statistics import mean
from typing import Any

import jax
import numpy as np

import specjax
from specjax import wire
from specjax.client.device import ALONE, ClientDevice, Settings
from specjax.client.speculation import Speculation
from specjax.drafters import Drafter, Eagle3, MixtureOfAttentions
from specjax.drafters.methods.mixture_of_attentions import with_told
from specjax.drafts.shapes import Chain
from specjax.models.config import ModelConfig
from specjax.models.published import published
from specjax.planning.messages import Reader, message_sizes
from specjax.progress import track
from specjax.sampling import Sampling
from specjax.serving import ClientDrafts
from specjax.wire.messages import NO_PARENT

CHAIN = 5
"""The length of the chains whose acceptance is counted."""

GREEDY = Sampling(temperature=0.0)

PRECISIONS: tuple[wire.Precision, ...] = ("float32", "float16", "int8")
"""The number formats in which hidden states may be sent."""

# --- bytes ----------------------------------------------------------------------------------------

READERS: dict[str, tuple[Reader, int]] = {
    "draft model": ("draft model", 0),
    "EAGLE-3": ("eagle3", 0),
    "MoA": ("moa", 0),
    "MoA, TLI 1": ("moa", 1),
    "MoA, TLI 3": ("moa", 3),
    "MoA, entries": ("moa, layers on the client", 0),
}
"""The drafters by their names in the formula, with their target layers."""


def bytes_of_rounds(shape: str, nodes: int, tokens: int, rate: float) -> list[dict[str, Any]]:
    """Return the bytes of a round for a published target, by the paper's formula and in our frames.

    Args:
        shape: the target's published shape.
        nodes: the number of drafted tokens, without the root.
        tokens: the number of tokens that the round adds.
        rate: bits per second, to compute the milliseconds of the answer on the line.
    """
    config = published(shape)
    rows = []
    for name, (reader, tli) in READERS.items():
        formula = message_sizes(reader, config, nodes=nodes, accepted=tokens, tli=tli)
        tells = tells_of(name, config)
        down = {precision: len(verdict(tells, tokens, precision)) for precision in PRECISIONS}
        rows.append(
            {
                "drafter": name,
                "formula": {"up": formula.up, "down": formula.down},
                "ours": {"up": len(draft(nodes)), "down": down},
                "milliseconds": {precision: 8e3 * size / rate for precision, size in down.items()},
            }
        )
    return rows


def tells_of(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that a client with the drafter receives per token.

    No weights are made.
    """
    key = jax.random.key(0)
    target = jax.eval_shape(partial(specjax.Target.init, config), key)
    tli = READERS[name][1]
    makers: dict[str, Any] = {"draft model": None, "EAGLE-3": partial(Eagle3.init, target)}
    make = makers.get(name, partial(MixtureOfAttentions.init, target, tli=tli))
    if make is None:
        return {}
    drafter = jax.eval_shape(make, key)
    return ClientDrafts(with_told(drafter, "entries") if name == "MoA, entries" else drafter).tells(
        target
    )


def draft(nodes: int) -> bytes:
    """Return the frame of a draft with this many nodes below the root."""
    tokens, parents = (
        np.zeros(nodes + 1, np.int32),
        np.maximum(np.arange(-1, nodes), 0).astype(np.uint8),
    )
    parents[0] = NO_PARENT
    packed = {"tokens": wire.pack(tokens, "int32"), "parents": wire.pack(parents, "uint8")}
    return wire.encode(
        wire.DraftMessage(
            session=bytes(16), epoch=0, sequence=100, base=500, digest=bytes(8), **packed
        )
    )


def verdict(tells: Mapping[str, tuple[int, ...]], tokens: int, precision: wire.Precision) -> bytes:
    """Return the frame of a verdict that adds this many tokens."""
    draw = np.random.default_rng(0)
    arrays = {
        name: wire.pack(draw.standard_normal((tokens, *shape)), precision)
        for name, shape in tells.items()
    }
    accepted = list(range(1, tokens))
    answer = wire.VerdictMessage(
        session=bytes(16),
        epoch=0,
        sequence=100,
        accepted=accepted,
        token=1000,
        arrays=arrays,
        over="",
        seconds=0.025,
    )
    return wire.encode(answer)


# --- a text that is there already -----------------------------------------------------------------


class Reading:
    """Texts that a target has written, and its hidden states of each token.

    Attributes:
        device: the client's device.
        texts: ``[B, T]``.
    """

    def __init__(
        self, target: specjax.Target, drafter: Drafter, texts: np.ndarray, precision: wire.Precision
    ) -> None:
        """Compute all hidden states at once: those of a token do not depend on later tokens."""
        self.texts = texts
        room = texts.shape[1] + 2 * ALONE
        most = [room, target.config.max_positions, drafter.max_positions or room]
        self.device = ClientDevice(target, drafter, [Chain(CHAIN)], min(most))
        self.settings = Settings.of(GREEDY, seed=0)
        taps = drafter.taps(target.config)

        @jax.jit
        def tell(tokens: jax.Array) -> dict[str, jax.Array]:
            return drafter.remote_inputs(target, *target.read(tokens, taps=taps))

        states = [
            {name: np.asarray(array)[0] for name, array in tell(text[None]).items()}
            for text in texts
        ]
        self._states = [
            {name: wire.unpack(wire.pack(array, precision)) for name, array in arrays.items()}
            for arrays in states
        ]

    def told(
        self, number: int, start: int, end: int
    ) -> tuple[list[int], list[int], dict[str, np.ndarray]]:
        """Return some tokens of a text, the token after each, and the hidden states."""
        text = self.texts[number].tolist()
        arrays = {name: array[start:end] for name, array in self._states[number].items()}
        return text[start:end], text[start + 1 : end + 1], arrays

    def tokens_a_round(self, number: int, prompt: int) -> float:
        """Return the mean number of tokens that a round adds, with a chain of `CHAIN`."""
        text, device = self.texts[number].tolist(), self.device
        state, length, rounds = (
            device.append_remote(device.start(), *self.told(number, 0, prompt - 1)),
            prompt,
            0,
        )
        while length + CHAIN < len(text):
            path = device.propose(state, text[length - 1], length, self.settings, CHAIN).path
            same = np.cumprod(np.array(path) == text[length : length + len(path)])
            new = 1 + int(same.sum())
            state, rounds = (
                device.append_remote(state, *self.told(number, length - 1, length - 1 + new)),
                rounds + 1,
            )
            length += new
        return (length - prompt) / rounds

    def alone(self, number: int, length: int, tokens: int) -> np.ndarray:
        """Return where the drafter alone agrees with the target's text, after a cut."""
        text = self.texts[number].tolist()
        speculation = Speculation(self.device, self.settings, text[:length])
        speculation.append_remote(*self.told(number, 0, length - 1))
        while len(speculation.path) < tokens:
            speculation.draft(self.device.alone)
        return np.array(speculation.path[:tokens]) == text[length : length + tokens]


def written(target: specjax.Target, prompts: np.ndarray, tokens: int) -> np.ndarray:
    """Return ``[B, P + tokens]``: the prompts and the target's greedy text.

    No token ends a text.
    """
    return specjax.generate(target, None, prompts, max_new_tokens=tokens, eos_token_ids=()).tokens


def text_after_a_cut(
    target: specjax.Target,
    drafters: Mapping[str, Drafter],
    prompts: np.ndarray,
    before: int,
    alone: int,
) -> list[dict[str, Any]]:
    """Measure how much of the target's text each drafter writes alone after ``before`` tokens.

    Args:
        target: the target that writes the texts.
        drafters: the drafters by name.
        prompts: ``[B, P]``.
        before: tokens before the cut.
        alone: positions after the cut at which the two texts are compared.
    """
    texts, rows = written(target, prompts, before + alone), []
    for name, drafter in track(list(drafters.items()), "after a cut"):
        reading = Reading(target, drafter, texts, "float32")
        same = np.array(
            [
                reading.alone(number, prompts.shape[1] + before, alone)
                for number in range(len(texts))
            ]
        )
        agreed = np.cumprod(same, axis=1).sum(axis=1)
        rows.append(
            {
                "drafter": name,
                "until_first_difference": float(agreed.mean()),
                "error": (
                    float(agreed.std(ddof=1) / np.sqrt(len(agreed))) if len(agreed) > 1 else 0.0
                ),
                "right": {
                    str(count): float(same[:, :count].mean())
                    for count in (8, 20, 48)
                    if count <= alone
                },
                "by_place": same.mean(axis=0).tolist(),
                "unbroken": np.cumprod(same, axis=1).mean(axis=0).tolist(),
            }
        )
    return rows


def compression(
    target: specjax.Target, drafters: Mapping[str, Drafter], prompts: np.ndarray, tokens: int
) -> list[dict[str, Any]]:
    """Return tokens per round and bytes down per token, for each drafter and number format."""
    texts, rows = written(target, prompts, tokens), []
    jobs: list[tuple[str, Drafter, wire.Precision]] = []
    jobs += [
        (name, drafter, precision)
        for name, drafter in with_entries(drafters).items()
        for precision in PRECISIONS
    ]
    for name, drafter, precision in track(jobs, "compression"):
        reading = Reading(target, drafter, texts, precision)
        if not reading.device.hears:
            continue
        gained = [reading.tokens_a_round(number, prompts.shape[1]) for number in range(len(texts))]
        size = len(verdict(reading.device.hears, 5, precision)) - len(
            verdict(reading.device.hears, 4, precision)
        )
        rows.append(
            {
                "drafter": name,
                "precision": precision,
                "tokens_a_round": mean(gained),
                "bytes_a_token": size,
            }
        )
    return rows


def with_entries(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Return the drafters, with each Mixture of Attentions also as one that receives entries."""
    all_drafters: dict[str, Drafter] = {}
    for name, drafter in drafters.items():
        all_drafters[name] = drafter
        if isinstance(drafter, MixtureOfAttentions) and drafter.config.lsa is not None:
            all_drafters[f"{name}, entries"] = with_told(drafter, "entries")
    return all_drafters
