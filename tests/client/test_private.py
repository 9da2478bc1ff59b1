"""Tests that no frame holds anything private, and that the drafter still uses it."""

import random
from typing import Any

import jax
import numpy as np
import pytest

from specjax import Chain, MixtureOfAttentions, text, wire
from specjax.assets import embedded
from specjax.client import Client, Patience, ProvisionalEvent
from specjax.client.device import ClientDevice
from specjax.client.exchange import FeaturesReceived
from specjax.client.private import _touched, moved, split
from specjax.drafters.base import remote_entry_arrays
from specjax.errors import InputError
from specjax.models.config import Rope
from tests.conftest import tiny_target

CAPACITY = 96
WORDS = ("password", "secret", "méñü", "🔑 key")


@pytest.fixture(scope="module")
def tokenizer():
    return text.load_tokenizer(embedded("target"))


# --- which tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_token_with_any_private_character_is_private(tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    word = draw.choice(WORDS)
    parts = ["user = ", "'", " ", "import os\n", "é", "x", word, word]
    prompt = "".join(draw.choice(parts) for _ in range(12)) + word
    tokens = text.encode(tokenizer, prompt)
    hidden = split(tokenizer, prompt, tokens, [word])
    assert len(hidden) == len(tokens)
    spans = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    private = {
        place
        for at in range(len(prompt))
        if prompt.startswith(word, at)
        for place in range(at, at + len(word))
    }
    assert hidden == [any(place in private for place in range(*span)) for span in spans]
    assert word not in tokenizer.decode(
        [token for token, is_private in zip(tokens, hidden, strict=True) if not is_private]
    )


def test_strings_that_overlap(tokenizer) -> None:
    prompt = "aaaa b"
    hidden = split(tokenizer, prompt, text.encode(tokenizer, prompt), ["aaa"])
    spans = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    # The token that marks the beginning has no characters, and is not private.
    assert hidden == [begin < min(4, end) for begin, end in spans]


def test_what_cannot_be_kept_back_is_refused(tokenizer) -> None:
    prompt = "key = 'x'"
    tokens = text.encode(tokenizer, prompt)
    for private in ("key", [""], [3]):
        with pytest.raises(InputError, match="private:"):
            split(tokenizer, prompt, tokens, private)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="not in the prompt") as error:
        split(tokenizer, prompt, tokens, ["hunter2"])
    assert "hunter2" not in str(error.value)
    with pytest.raises(InputError, match="plain text"):
        split(tokenizer, prompt, tokens[:-1], ["key"])
    with pytest.raises(InputError, match="give a fast one"):
        split(object(), prompt, tokens, ["key"])


# --- keys at other places -------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "rope",
    [
        Rope(),
        Rope(kind="linear", factor=4.0),
        Rope(kind="yarn", factor=4.0, original_max_positions=128),
        Rope(kind="llama3", factor=8.0, original_max_positions=128),
    ],
    ids=lambda rope: rope.kind,
)
def test_keys_are_turned_to_where_they_would_be(rope: Rope) -> None:
    """Check it in the first layer, whose keys depend on a token and its position alone."""
    target = tiny_target(rope=rope)
    tokens, places = [4, 8, 1, 9], [2, 3, 7, 11]
    later = np.full(12, 5)
    later[places] = tokens
    drafter = MixtureOfAttentions.init(target, jax.random.key(0), tli=1).replace(told="entries")

    def told(read) -> dict[str, np.ndarray]:
        output, entries = target.read(np.asarray(read)[None])
        arrays = drafter.remote_inputs(target, output, entries) | remote_entry_arrays(entries, [0])
        return {name: np.asarray(array)[0] for name, array in arrays.items()}

    before, expected = told(tokens), told(later)
    after = moved(target, before, np.array(places) - np.arange(4))
    for name, of_first_layer in (
        ("layer0.0", lambda array: array),
        ("entries", lambda array: array[:, 0]),
    ):
        turned = of_first_layer(after[name])
        np.testing.assert_allclose(turned, of_first_layer(expected[name])[places], atol=1e-4)
        assert np.abs(turned - of_first_layer(before[name])).max() > 0.1
    np.testing.assert_array_equal(after["layer0.1"], before["layer0.1"])


# --- the whole way --------------------------------------------------------------------------------


class Server:
    """A link to a server that reads texts and sends their hidden states. It records all frames."""

    def __init__(self, target, drafter) -> None:
        self.target, self.drafter = target, drafter
        self.up: list[bytes] = []
        self.down: list[bytes] = []
        self.is_there = True
        self._inbox: list[bytes] = []
        self._now = 0.0

    def connect(self, timeout: float) -> None: ...

    def is_open(self) -> bool:
        return self.is_there

    def send(self, frame: bytes) -> None:
        self.up.append(frame)
        message = wire.decode_up(frame)
        if not isinstance(message, wire.OpenMessage):
            assert isinstance(message, wire.CloseMessage)
            return
        tokens, session = wire.unpack(message.tokens), {"session": bytes(16), "epoch": 0}
        output, entries = self.target.read(tokens[None], taps=self.drafter.taps(self.target.config))
        inputs = {
            name: np.asarray(array)[0, :-1]
            for name, array in self.drafter.remote_inputs(self.target, output, entries).items()
        }
        shapes = {name: list(array.shape[1:]) for name, array in inputs.items()}
        packed = {name: wire.pack(array, "float32") for name, array in inputs.items()}
        for answer in (
            wire.OpenedMessage(nodes=8, depth=4, capacity=CAPACITY, tells=shapes, **session),
            wire.ToldMessage(start=0, count=len(tokens) - 1, arrays=packed, **session),
            wire.ReadyMessage(length=len(tokens), **session),
        ):
            self._inbox.append(wire.encode(answer))

    def receive(self, timeout: float) -> bytes | None:
        self._now += timeout
        if self._inbox:
            self.down.append(self._inbox.pop(0))
            return self.down[-1]
        return None

    def close(self) -> None: ...

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class Place:
    """A client with a server that records all frames."""

    def __init__(self, tokenizer, drafter=None) -> None:
        self.target = tiny_target(vocab_size=3072)
        self.drafter = drafter or MixtureOfAttentions.init(self.target, jax.random.key(1), tli=1)
        self.device = ClientDevice(self.target, self.drafter, [Chain(2)], CAPACITY)
        self.tokenizer = tokenizer

    def write(
        self, prompt: str, private: list[str], is_there: bool = True
    ) -> tuple[list[int], Server, list[FeaturesReceived]]:
        """Return the provisional text, the server, and the hidden states the drafter received."""
        server = Server(self.target, self.drafter)
        server.is_there = is_there
        patience = Patience(server=5.0)
        client = Client(self.device, lambda: server, tokenizer=self.tokenizer, patience=patience)
        writer = client.stream(
            prompt, private=(string for string in private), max_new_tokens=12, eos_token_ids=()
        )
        received: list[FeaturesReceived] = []
        speculation: Any = writer._writer.speculation  # pyright: ignore[reportAttributeAccessIssue]
        append_remote = speculation.append_remote
        speculation.append_remote = lambda *features: (
            received.append(FeaturesReceived(*features)),
            append_remote(*features),
        )
        events = list(writer)
        assert all(isinstance(event, ProvisionalEvent) for event in events)
        report = client.report
        assert (report.tokens, report.finish_reason) == ((), "offline")
        return list(report.provisional_tokens), server, received


@pytest.fixture(scope="module")
def place(tokenizer) -> Place:
    return Place(tokenizer)


def prompt_with(word: str) -> str:
    return f"import os\nname = '{word}'\nprint(name)\nreturn"


@pytest.mark.full
def test_no_frame_has_anything_private(place: Place) -> None:
    word = "correct_horse_battery"
    prompt = prompt_with(word)
    tokens = text.encode(place.tokenizer, prompt)
    hidden = split(place.tokenizer, prompt, tokens, [word])
    marked = list(zip(tokens, hidden, strict=True))
    safe = [token for token, is_hidden in marked if not is_hidden]
    private = {token for token, is_hidden in marked if is_hidden} - set(safe)
    assert len(private) > 2
    _, server, _ = place.write(prompt, [word])
    assert [type(wire.decode_up(frame)) for frame in server.up] == [
        wire.OpenMessage,
        wire.CloseMessage,
    ]
    opened = wire.decode_up(server.up[0])
    assert isinstance(opened, wire.OpenMessage)
    assert wire.unpack(opened.tokens).tolist() == [*safe, safe[-1]]
    for frame in [*server.up, *server.down]:
        assert not any(part.encode() in frame for part in (word, *word.split("_")))
    for frame in server.up:
        assert not any(int(token).to_bytes(4, "little") in frame for token in private)
        assert len(frame) < 400


@pytest.mark.full
def test_all_that_is_safe_is_heard_and_the_rest_is_assumed(place: Place) -> None:
    prompt = prompt_with("hunter2")
    tokens = text.encode(place.tokenizer, prompt)
    for private in (["hunter2"], ["return"], ["import"], ["name"], ["hunter2", "print", "os"]):
        hidden = split(place.tokenizer, prompt, tokens, private)
        _, _, received = place.write(prompt, private)
        safe = [
            token for token, is_private in zip(tokens[:-1], hidden, strict=False) if not is_private
        ]
        # With the last safe token too, if it is not the root.
        assert [token for features in received for token in features.tokens] == safe
        for features in received:
            assert all(len(array) == len(features.tokens) for array in features.arrays.values())


@pytest.mark.full
def test_the_drafter_sees_what_the_server_does_not(place: Place) -> None:
    texts, opens = set(), []
    for word in ("hunter2", "zebra99", "a_b_c_d"):
        tokens, server, _ = place.write(prompt_with(word), [word])
        assert len(tokens) == 12
        texts.add(tuple(tokens))
        opened = wire.decode_up(server.up[0])
        assert isinstance(opened, wire.OpenMessage)
        sent = wire.unpack(opened.tokens).tolist()
        opens.append((sent, opened.prompt, opened.limit, opened.seed, opened.known))
    assert len(texts) == 3
    assert opens[0] == opens[1] == opens[2]


@pytest.mark.full
def test_all_of_it_is_private_or_nobody_is_there(place: Place) -> None:
    tokens, server, received = place.write("hunter2", ["hunter2"])
    start = place.tokenizer.bos_token_id  # the only token that is not private
    opened = wire.decode_up(server.up[0])
    assert isinstance(opened, wire.OpenMessage)
    assert (len(tokens), len(received)) == (12, 1)
    assert wire.unpack(opened.tokens).tolist() == [start, start]
    tokens, server, received = place.write(prompt_with("hunter2"), ["hunter2"], is_there=False)
    assert (len(tokens), server.up, received) == (12, [], [])


def test_no_journal_and_no_tokens(place: Place, tmp_path) -> None:
    client = Client(
        place.device, lambda: Server(place.target, place.drafter), tokenizer=place.tokenizer
    )
    with pytest.raises(InputError, match="private: "):
        client.stream("hunter2", private=["hunter2"], max_new_tokens=12, journal=tmp_path / "x")
    with pytest.raises(InputError, match="private: "):
        client.stream([5, 6], private=["hunter2"], max_new_tokens=12)
    assert not list(tmp_path.iterdir())


def test_a_space_that_a_tokenizer_counts_to_no_token_is_private() -> None:
    """Check tokens whose offsets leave out a space.

    The offsets of a token that begins with a space may begin after it, and a token of spaces may
    have no characters.
    """
    # "a", " pass" and " b", whose space is private.
    word = np.array([False, False, True, True, True, True, True, False])
    assert _touched(word, [(0, 2), (2, 6), (7, 8)]) == [False, True, True]
    spaces = np.array([False, True, True, True, False])
    assert _touched(spaces, [(0, 1), (2, 2), (4, 4), (4, 5)]) == [False, True, True, False]
