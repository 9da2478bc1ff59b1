"""The reader of JSON that arrives in pieces, beside Python's own reader."""

import json
import random
from typing import Any

import pytest

from specjax.chat.json_reader import MAX_DEPTH, JsonReader


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.choice([rng.randrange(-1000, 1000), rng.random() * 10 ** rng.randrange(-20, 20)])
    if kind < 5:
        return "".join(rng.choice('ab"\\\n{}[]:,é日🎉 u/') for _ in range(rng.randrange(6)))
    if kind < 7:
        return {str(rng.randrange(9)): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def _damaged(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    inserted = rng.choice(
        ["", '"', "}", "]", ",", "x", "1", "e", ".", "-", "\\", " ", ":", "\n", "\t"]
    )
    return text[:place] + inserted + text[place + rng.randrange(2) :]


def _end(text: str) -> int | None:
    """Return where Python's reader ends the value at the begin of a text; None if it is none."""

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    decoder = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=refuse)
    try:
        value, end = decoder.raw_decode(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates
        return end
    except ValueError:
        return None


def _pushed(text: str, rng: random.Random) -> JsonReader:
    reader, position = JsonReader(), 0
    while position < len(text):
        count = rng.randrange(1, 5)
        reader.push(text[position : position + count])
        position += count
    return reader


@pytest.mark.parametrize("seed", range(4))
def test_random_and_damaged_values_end_where_pythons_reader_ends_them(seed) -> None:
    rng = random.Random(seed)
    ends = []
    for _ in range(1500):
        value = {"a": _value(rng)} if rng.random() < 0.5 else [_value(rng)]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
        text = _damaged(text, rng) if rng.random() < 0.6 else text
        if text[:1] not in ("{", "["):
            continue
        reader, end = _pushed(text, rng), _end(text)
        assert (reader.length if reader.is_complete else None) == end, text
        ends.append(end is None)
    assert 300 < sum(ends) < 1200  # both outcomes are tested


def test_marks_say_where_the_values_are() -> None:
    text = '{"a": [10, {"b": "x"}], "c": true}'
    marks = JsonReader().push(text)
    spans: dict[Any, list[int]] = {}
    for mark in marks:
        spans.setdefault(mark.path, []).append(mark.offset)
    assert {path: text[start:end] for path, (start, end) in spans.items()} == {
        (): text,
        ("a",): '[10, {"b": "x"}]',
        ("a", 0): "10",
        ("a", 1): '{"b": "x"}',
        ("a", 1, "b"): '"x"',
        ("c",): "true",
    }


@pytest.mark.parametrize("text", ["NaN", '{"a": NaN}', '{"a": Infinity}', "1", '"a"', "", " {}"])
def test_what_is_no_object_or_array_is_not_complete(text) -> None:
    reader = JsonReader()
    reader.push(text)
    assert not reader.is_complete
    assert reader.is_broken == bool(text)


def test_deep_values_are_refused() -> None:
    reader = JsonReader()
    reader.push("[" * MAX_DEPTH)
    assert not reader.is_broken
    reader.push("[")
    assert reader.is_broken


def test_a_long_string_is_read_in_linear_time() -> None:
    reader = JsonReader()
    reader.push('{"a": "')
    for _ in range(2000):
        reader.push("x" * 100)
        assert len(reader._recent) <= 100
    reader.push('"}')
    assert reader.is_complete and reader.length == 200_009
