"""``specjax convert``: from one layout to the other and back, bit for bit; and ``train --dry-run``."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cli.main import main
from specjax.drafters import Eagle, Eagle3, MixtureOfAttentions
from specjax.drafts.shapes import Chain
from tests.conftest import save_tiny, tiny_target


@pytest.fixture
def drafter(tmp_path):
    made = Eagle3.init(tiny_target(), jax.random.key(0), Chain(3), ids=np.arange(1, 9), taps=(0, 1, 2))
    made.save_pretrained(tmp_path / "ours", dtype=jnp.bfloat16)
    return tmp_path / "ours"


def test_there_and_back_again_is_the_same_to_the_bit(drafter, tmp_path, capsys) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["convert", "--drafter", str(drafter), "--output", str(there), "--target", "some/target"]) == 0
    assert "layout speculators, bfloat16; eagle_aux_hidden_state_layer_ids=[0, 1, 2]: the layers that are entered" in (
        " ".join(capsys.readouterr().out.split())
    )
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert main(["convert", "--drafter", str(there), "--to", "eagle3", "--output", str(back)]) == 0
    assert "[-1, 0, 1]: the layers whose output is read" in " ".join(capsys.readouterr().out.split())
    for file in drafter.iterdir():
        assert file.read_bytes() == (back / file.name).read_bytes()


def test_what_cannot_be_converted_is_refused(drafter, tmp_path, capsys) -> None:
    assert main(["convert", "--drafter", str(drafter), "--output", str(drafter)]) == 2
    assert "is the drafter itself" in capsys.readouterr().err
    assert main(["convert", "--output", "x"]) == 2
    assert "drafter=''" in capsys.readouterr().err
    save_tiny(tmp_path / "model")
    assert main(["convert", "--drafter", str(tmp_path / "model"), "--output", str(tmp_path / "x")]) == 2
    assert "is no drafter that is trained for its target: there is nothing to convert; several have" in capsys.readouterr().err


def test_mixture_of_attentions_goes_to_the_authors_layouts_and_back(tmp_path, capsys) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    MixtureOfAttentions.init(target, jax.random.key(0)).save_pretrained(tmp_path / "specjax", dtype=jnp.bfloat16)
    of_target = ("--target", str(tmp_path / "target"))
    before = "specjax"
    for place, layout in (("vllm", "vllm"), ("authors", "authors"), ("vllm again", "vllm")):
        step = ("--drafter", str(tmp_path / before), "--to", layout, "--output", str(tmp_path / place), *of_target)
        assert main(["convert", *step]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"layout {layout}, bfloat16; target layer inference is not in it: load it with tli=0" in out
        before = place
    kinds = {name: json.loads((tmp_path / name / "config.json").read_text())["architectures"] for name in ("vllm", "authors")}
    assert kinds == {"vllm": ["MOASpecModel"], "authors": ["MOASpec"]}
    for file in (tmp_path / "vllm").iterdir():
        assert file.read_bytes() == (tmp_path / "vllm again" / file.name).read_bytes()


def test_a_layout_that_a_drafter_lacks_is_refused(drafter, tmp_path, capsys) -> None:
    Eagle.init(tiny_target(), jax.random.key(0)).save_pretrained(tmp_path / "eagle")
    for place, words in (
        ("eagle", "is an EAGLE drafter, which is written in one layout: there is nothing to convert; several have"),
        ("ours", "to='vllm': an EAGLE-3 drafter is written as eagle3, speculators: give one of these"),
    ):
        assert main(["convert", "--drafter", str(tmp_path / place), "--to", "vllm", "--output", str(tmp_path / "x")]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


def test_a_dry_run_says_what_a_run_takes_and_takes_nothing(tmp_path, capsys) -> None:
    target = save_tiny(tmp_path / "target", num_layers=1)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: eagle3, target: {target}, steps: 2, draft_vocab_size: 100}}\n"
        "steps: 10\ndata: {source: nowhere, window: 16, batch: 2}\n"
    )
    assert main(["train", "--config", str(file), "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "d2t │ 100 │ frozen" in out
    assert "fc │ 16 x 16 │" in out.replace("params.fc", "fc")
    assert "tokens [2, 17]" in out
    assert "10 steps of 2 x 16 tokens, 320 in all. Nothing was trained." in out
    assert not (tmp_path / "run").exists()
