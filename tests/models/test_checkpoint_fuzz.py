"""Damaged checkpoints by the hundred: each loads, or is refused in one line.

A case takes a tiny valid checkpoint and changes one to three things in one of its files. A field is
dropped, or gets a value of another type or an extreme one; bytes are cut off or overwritten.
Everything follows from the number of the case.
"""

import copy
import json
import random
import struct
from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig, Rope
from specjax.models.families.ropes import FULL, WINDOWED
from specjax.models.rope import inverse_frequencies
from specjax.models.transformer import Target
from tests.conftest import MIXTURES, tiny_target
from tests.models.families import zoo

NUMBERS = [0, 1, -1, 2, 3, 7, 16, 2**31, 2**63, -(2**63), 10**400, 0.5, 16.0, 1e-45, 1e308, -1e308]
NOT_NUMBERS = [
    float("nan"),
    float("inf"),
    float("-inf"),
    None,
    True,
    False,
    "",
    "16",
    "float32",
    "\n",
    "\u2028x",
    "../x",
    "\0",
]
NESTED = [[], [1], ["a"], [None], [[1]], {}, {"a": 1}, {"rope_type": "yarn"}, {"": None}]
VALUES = NUMBERS + NOT_NUMBERS + NESTED
ROPES = [
    Rope(),
    Rope(kind="linear", factor=2.0),
    Rope(kind="llama3", factor=8.0, original_max_positions=32),
    Rope(kind="yarn", factor=4.0, original_max_positions=64, mscale=1.0, mscale_all_dim=0.5),
]
SHARD = "model-00001-of-00001.safetensors"
JSON_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[dict[str, bytes]]:
    """Return valid checkpoints, as the contents of their files.

    There is one for every kind of RoPE, of experts and of family, each in one file, and in a shard
    with an index.
    """
    checkpoints = []
    path = tmp_path_factory.mktemp("original")
    common = {"tie_embeddings": True, "eos_token_ids": (3, 4), "bos_token_id": 1}
    target = tiny_target(**common)
    targets = [target.replace(config=replace(target.config, rope=rope)) for rope in ROPES]
    targets += [tiny_target(**common, **changes) for changes in MIXTURES.values()]
    targets += [Target.init(config, jax.random.key(0)) for config in of_families()]
    for target in [*targets, *quantized_ones(path)]:
        target.save_pretrained(path)
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        index = {"metadata": {}, "weight_map": dict.fromkeys(CheckpointFiles(path).shapes, SHARD)}
        weights = files.pop("model.safetensors")
        checkpoints.append(files | {"model.safetensors": weights})
        checkpoints.append(
            files | {SHARD: weights, "model.safetensors.index.json": json.dumps(index).encode()}
        )
    return checkpoints


def quantized_ones(path) -> list[Target]:
    """Return targets with quantized weights.

    Their checkpoints are in two schemes, and packed with and without zeros.
    """
    tiny_target(hidden_size=32, eos_token_ids=(3, 4)).save_pretrained(path)
    targets = [
        Target.from_pretrained(path, weights=weights, dtype=np.float32)
        for weights in ("w8a8", "int4", "fp8")
    ]
    layer = dict(targets[1].params["layers"][0])
    for name in ("q", "up"):
        groups, outputs, size = layer[name].values.shape
        values = layer[name].values.reshape(4, outputs, size // 4)
        scales = layer[name].scales.repeat(4, axis=0)
        zeros, order = np.ones((4, outputs), np.int8), np.arange(32, dtype=np.int32)[::-1]
        layer[name] = layer[name].replace(values=values, scales=scales, zeros=zeros, order=order)
        assert groups == 1
    asymmetric = targets[1].replace(
        params={**targets[1].params, "layers": [layer, *targets[1].params["layers"][1:]]}
    )
    return [*targets, asymmetric]


def of_families() -> list[ModelConfig]:
    """Return the configurations of the models of the zoo."""
    configs = []
    for name, (_, fields) in zoo.MODELS.items():
        raw = {name: value for name, value in fields.items() if value is not None}
        raw |= {"model_type": zoo.model_type(name), "eos_token_id": [3, 4], "bos_token_id": 1}
        if "use_sliding_window" in fields:  # as transformers writes it
            raw["layer_types"] = [
                (FULL, WINDOWED)[not has_rope] for has_rope in fields["no_rope_layers"]
            ]
        configs.append(config_json.parse_config(raw))
    return configs


def places(node, path=()):
    """Yield every place in a JSON value that can be changed, as the keys that lead there."""
    items = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def change_value(rng: random.Random, content):
    """Return ``content`` with one value dropped, replaced, renamed or wrapped."""
    content = copy.deepcopy(content)
    *path, last = rng.choice(list(places(content)) or [("new",)])
    node = content
    for key in path:
        node = node[key]
    match rng.randrange(6):
        case 0 if isinstance(node, dict):
            node.pop(last, None)
        case 1 if isinstance(node, dict):
            node[rng.choice(["", "\n", "x", str(last) * 2])] = node.pop(last, None)
        case 2:
            node[last] = (
                rng.choice([[node.get(last)], {"a": node.get(last)}])
                if isinstance(node, dict)
                else [node[last]]
            )
        case 3:
            node[last] = str(node.get(last)) if isinstance(node, dict) else "text"
        case _:
            node[last] = rng.choice(VALUES)
    return content


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return ``content`` cut off, or with bytes overwritten, put in or replaced altogether."""
    offset = rng.randrange(len(content) + 1)
    garbage = rng.randbytes(rng.choice([1, 2, 8, 64]))
    match rng.randrange(5):
        case 0:
            return content[:offset]
        case 1:
            return content[:offset] + garbage + content[offset + len(garbage) :]
        case 2:
            return content[:offset] + garbage + content[offset:]
        case 3:
            return rng.choice(
                [
                    b"",
                    garbage,
                    b"null",
                    b"[]",
                    b'"text"',
                    b"7",
                    b"[" * 100_000,
                    b"\xff\xfe{}",
                    b"\xef\xbb\xbf{}",
                ]
            )
        case _:
            return content[offset:]


def change_json(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.2:
        return change_bytes(rng, content)
    value = json.loads(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if isinstance(value, dict):
            value = change_value(rng, value)
    return json.dumps(value).encode()


def change_tensors(rng: random.Random, content: bytes) -> bytes:
    """Damage a safetensors file: eight bytes of length, the header in JSON, the weights."""
    length = struct.unpack("<Q", content[:8])[0]
    header, weights = content[8 : 8 + length], content[8 + length :]
    match rng.randrange(6):
        case 0:
            return change_bytes(rng, content)
        case 1:
            wrong = rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
            return struct.pack("<Q", wrong) + content[8:]
        case 2:
            # The format cannot see a type of the same size, or a shape of as many values.
            table = json.loads(header)
            entry = table[rng.choice([name for name in table if name != "__metadata__"])]
            if rng.random() < 0.5:
                entry["dtype"] = rng.choice(
                    ["I32", "U32", "F16", "F8_E4M3", "F4", "C64", "nonsense"]
                )
            else:
                entry["shape"] = rng.choice(
                    [entry["shape"][::-1], [1, *entry["shape"]], [int(np.prod(entry["shape"]))], []]
                )
            header = json.dumps(table).encode()
        case 3:
            table = json.loads(header)
            name = rng.choice([name for name in table if name != "__metadata__"])
            layer = f"model.layers.{'9' * rng.choice([1, 5, 30, 5000])}.x"
            new_name = rng.choice(["", "\n", "x", f"{name}.bias", layer, "lm_head.weight"])
            table[new_name] = table.pop(name)
            header = json.dumps(table).encode()
        case _:
            header = change_json(rng, header)
    return struct.pack("<Q", len(header)) + header + weights


def damaged(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    names = sorted(files)
    weights = [4 if name == "config.json" else 1 for name in names]
    (name,) = rng.choices(names, weights)
    if rng.random() < 0.02:
        return {file: content for file, content in files.items() if file != name}
    change = change_json if name in JSON_FILES else change_tensors
    return files | {name: change(rng, files[name])}


@pytest.mark.full
@pytest.mark.parametrize("cases", [800, pytest.param(60_000, marks=pytest.mark.thorough)])
# A flipped bit makes a stored head differ from the embedding.
@pytest.mark.filterwarnings("ignore:.*the stored head is used")
def test_a_damaged_checkpoint_loads_or_is_refused_in_a_line(originals, tmp_path, cases) -> None:
    loaded, reasons = 0, set()
    for case in range(cases):
        rng = random.Random(case)
        files = damaged(rng, rng.choice(originals))
        for file in tmp_path.iterdir():
            file.unlink()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        try:
            config = config_json.read_config(CheckpointFiles(tmp_path))
            for layer in {config, *map(config.of_layer, range(len(config.layers)))}:
                frequencies, factor = inverse_frequencies(layer.rope, layer.head_dim)
                assert np.isfinite(frequencies).all() and np.isfinite(factor), layer.rope
            Target.from_pretrained(tmp_path, dtype=np.float32)
            loaded += 1
        except InputError as error:
            message = str(error)
            assert message.splitlines() == [message], f"case {case}: {message!r}"
            assert len(message) < 1000, f"case {case}: {message!r}"
            reasons.add(message.replace(str(tmp_path), "")[:60])
        except Exception as error:
            raise AssertionError(
                f"case {case} ended in a {type(error).__name__}: {error}"
            ) from error
    # Some changes are harmless. Most are refused, for many different reasons.
    assert 0.05 * cases < loaded < 0.5 * cases, loaded
    assert len(reasons) > 100, len(reasons)
