"""The files of a checkpoint are read right, and by each load at most once."""

import json
import os
import shutil
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

import specjax
from specjax import text
from specjax.cli.main import main
from specjax.models import checkpoint_files, config_json, fields, hub
from specjax.models.checkpoint_files import INDEX, WEIGHTS, CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.conftest import ASSETS, tiny_target

LIBRARIES = ("transformers", "tokenizers", "huggingface_hub")
"""The libraries whose reads are not counted."""
_opened: list[tuple[str, str]] = []
_state = {"hooked": False, "watching": False}


def _watch(event: str, arguments: tuple) -> None:
    """Record an opened file and the library that opens it.

    Python calls this audit hook for every function that opens a file.
    """
    if not _state["watching"] or event != "open" or not isinstance(arguments[0], str | os.PathLike):
        return
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in (
        "specjax",
        *LIBRARIES,
    ):
        frame = frame.f_back
    reader = "" if frame is None else frame.f_globals["__name__"].partition(".")[0]
    _opened.append((reader, os.fspath(arguments[0])))


@pytest.fixture
def reads(monkeypatch):
    """Return a function that counts the files of a directory that specjax opens in a call.

    A file of weights counts each time that its header is read.
    """
    if not _state["hooked"]:  # a hook cannot be removed
        sys.addaudithook(_watch)
        _state["hooked"] = True
    open_weights = safetensors.safe_open

    # safetensors opens files from Rust, which no hook sees.
    def safe_open(path, **options):
        if _state["watching"]:
            _opened.append(("specjax", str(path)))
        return open_weights(path, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("specjax") and getattr(module, "safe_open", None) is open_weights:
            monkeypatch.setattr(module, "safe_open", safe_open)

    def count(root: Path, function) -> dict[str, int]:
        _opened.clear()
        _state["watching"] = True
        try:
            function()
        finally:
            _state["watching"] = False
        ours = Counter(Path(path) for reader, path in _opened if reader not in LIBRARIES)
        return {
            str(path.relative_to(root)): number
            for path, number in ours.items()
            if path.is_relative_to(root)
        }

    return count


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import transformers beforehand, which takes seconds."""
    text.load_tokenizer(ASSETS / "target")


def once(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 1)


TARGET = once("target/config.json", "target/generation_config.json", "target/model.safetensors")
TOKENIZER = once("target/tokenizer_config.json")
DRAFT = once("draft/config.json", "draft/generation_config.json", "draft/model.safetensors")
EAGLE = once("eagle3/config.json", "eagle3/model.safetensors")


@pytest.mark.full
@pytest.mark.thorough_except("pair", "named", "draft model", "quantized")
@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda: specjax.load("embedded", "embedded:eagle3"), TARGET | TOKENIZER | EAGLE),
        (lambda: specjax.load("embedded", "eagle3:embedded:eagle3"), TARGET | TOKENIZER | EAGLE),
        (
            lambda: specjax.load("embedded", "embedded:draft"),
            TARGET | TOKENIZER | DRAFT | once("draft/tokenizer_config.json"),
        ),
        (lambda: specjax.load("embedded", "early-exit:2", weights="int8"), TARGET | TOKENIZER),
        (lambda: Target.from_pretrained("embedded"), TARGET),
        (lambda: Target.from_pretrained("embedded", layers=(1, 2)), TARGET),
        (lambda: specjax.Eagle3.from_pretrained("embedded:eagle3"), EAGLE),
        (lambda: specjax.Eagle3.abstract_from("embedded:eagle3", dtype=np.float32), EAGLE),
        (lambda: specjax.DraftModel.from_pretrained("embedded:draft"), DRAFT),
    ],
    ids=[
        "pair",
        "named",
        "draft model",
        "quantized",
        "target",
        "part",
        "drafter",
        "abstract",
        "whole drafter",
    ],
)
def test_a_load_reads_every_file_once(reads, load, expected) -> None:
    assert reads(ASSETS, load) == expected


def test_so_does_a_conversion(reads, tmp_path) -> None:
    line = [
        "convert",
        "--drafter",
        "embedded:eagle3",
        "--to",
        "speculators",
        "--output",
        str(tmp_path / "out"),
    ]
    assert reads(ASSETS, lambda: main(line)) == EAGLE


def sharded(target: Target, directory: Path) -> None:
    """Write a checkpoint of two files and an index."""
    target.save_pretrained(directory)
    tensors = load_file(directory / WEIGHTS)
    shards = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(tensors)
    }
    for file in set(shards.values()):
        save_file(
            {name: tensor for name, tensor in tensors.items() if shards[name] == file},
            directory / file,
        )
    (directory / INDEX).write_text(json.dumps({"weight_map": shards}))
    (directory / WEIGHTS).unlink()


def test_so_are_an_index_and_every_shard(reads, tmp_path) -> None:
    """The model may have its embedding as head, for which tensors are read before the load."""
    sharded(tiny_target(model_type="qwen2", qkv_bias=True, tie_embeddings=True), tmp_path)
    shards = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    expected = once("config.json", "generation_config.json", INDEX, *shards)
    assert reads(tmp_path, lambda: Target.from_pretrained(tmp_path)) == expected


def test_a_reader_that_reads_again_is_noticed(reads, monkeypatch) -> None:
    """A reader is noticed whether it reads through `CheckpointFiles` or past it.

    Otherwise the counts above would mean nothing.
    """
    parse = config_json.read_part

    def read_past(files):
        json.loads((files.directory / "config.json").read_text())
        return parse(files)

    monkeypatch.setattr(config_json, "read_part", read_past)
    assert reads(ASSETS, lambda: Target.from_pretrained("embedded")) == TARGET | {
        "target/config.json": 2
    }

    def open_anew(files):
        fields.read_json(files.directory / "config.json")
        assert CheckpointFiles(files.directory).shapes
        return parse(files)

    monkeypatch.setattr(config_json, "read_part", open_anew)
    twice = {"target/config.json": 3, "target/model.safetensors": 2}
    assert reads(ASSETS, lambda: Target.from_pretrained("embedded")) == TARGET | twice


def test_what_is_read_is_what_the_files_hold() -> None:
    files, directory = hub.open_checkpoint("embedded"), ASSETS / "target"
    content = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / WEIGHTS)
    assert (files.directory, str(files)) == (directory, "embedded")
    assert files.file == str(directory / "config.json")
    assert files.raw == files.json("config.json") == content
    assert files.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert set(files.tensor_names) == set(tensors) and files.forms == {}
    assert files.weight_bytes == (directory / WEIGHTS).stat().st_size
    for name, tensor in files.tensors.items():
        np.testing.assert_array_equal(tensor[(slice(None),) * tensors[name].ndim], tensors[name])
    assert files.json("generation_config.json", {}) == json.loads(
        (directory / "generation_config.json").read_text()
    )
    assert files.json("none.json", {"default": 1}) == {"default": 1}
    with pytest.raises(CheckpointError, match=r"none\.json is missing"):
        files.json("none.json")


def test_no_reader_changes_what_the_next_one_is_given() -> None:
    files = hub.open_checkpoint("embedded:eagle3"), hub.open_checkpoint("embedded")
    before = deepcopy([checkpoint.raw for checkpoint in files])
    drafter, target = specjax.Eagle3.from_pretrained(files[0]), Target.from_pretrained(files[1])
    assert [checkpoint.raw for checkpoint in files] == before
    again = specjax.Eagle3.from_pretrained(files[0]), Target.from_pretrained(files[1])
    assert jax.tree.all(jax.tree.map(np.array_equal, again, (drafter, target)))


def test_a_checkpoint_that_is_written_anew_is_read_anew(tmp_path) -> None:
    """The next load of the same path reads the new files.

    Files that were opened before have their old content.
    """
    first, second = tiny_target(), tiny_target(num_layers=1)
    first.save_pretrained(tmp_path)
    opened = hub.open_checkpoint(tmp_path)
    assert len(opened.shapes) > len(second.params)
    assert opened.raw["num_hidden_layers"] == first.config.num_layers
    second.save_pretrained(tmp_path)
    read = Target.from_pretrained(tmp_path, dtype=np.float32)
    assert read.config == second.config
    assert jax.tree.all(jax.tree.map(np.array_equal, read.params, second.params))
    earlier = Target.from_pretrained(opened, dtype=np.float32)
    assert earlier.config == first.config
    assert jax.tree.all(jax.tree.map(np.array_equal, earlier.params, first.params))


def test_a_file_that_comes_later_is_found(tmp_path) -> None:
    """A missing file is not remembered as missing.

    The weights of a repository, for example, come after its small files.
    """
    shutil.copyfile(ASSETS / "target" / "config.json", tmp_path / "config.json")
    files = CheckpointFiles(tmp_path)
    assert list(files.tensor_names) == [] and files.json("generation_config.json", {}) == {}
    with pytest.raises(
        CheckpointError, match=r"lacks model\.safetensors: download the checkpoint again"
    ):
        _ = files.shapes
    for name in (WEIGHTS, "generation_config.json"):
        shutil.copyfile(ASSETS / "target" / name, tmp_path / name)
    assert set(files.tensor_names) == set(files.shapes) == set(load_file(tmp_path / WEIGHTS))
    assert files.json("generation_config.json", {}) != {}


def test_files_of_the_hub_are_opened_once_while_the_repository_stays(monkeypatch, tmp_path) -> None:
    """Weights are fetched when they are needed.

    If another snapshot comes with them, nothing of the first is used.
    """
    for name in ("first", "second"):
        shutil.copytree(ASSETS / "target", tmp_path / name)
    snapshots = iter(["first", "first", "first", "second"])
    monkeypatch.setattr(hub, "locate", lambda name, weights=True: tmp_path / next(snapshots))
    for is_same in (True, False):
        small = hub.open_checkpoint("owner/name", weights=False)
        assert small.raw and hub.open_checkpoint(small, weights=False) is small
        whole = hub.open_checkpoint(small)
        assert (whole is small) is is_same and str(whole) == "owner/name"
    assert whole.directory == tmp_path / "second"


def test_open_files_are_closed_with_the_last_that_needs_them(tmp_path) -> None:
    shutil.copytree(ASSETS / "eagle3", tmp_path / "eagle3")
    files = CheckpointFiles(tmp_path / "eagle3")
    tensors = files.tensors
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) in maps.read_text()
        del files, tensors
        assert str(tmp_path) not in maps.read_text()


def test_only_one_module_opens_files_with_weights() -> None:
    """Reads by other modules would not be counted above."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("specjax") and hasattr(module, "safe_open")
    ]
    assert modules == [checkpoint_files]
