"""The requirements of a run that is not run: the arrays that it would load, and its programs."""

import shutil

import jax
import pytest

from specjax.cli.main import main
from specjax.models.transformer import Target
from specjax.training.config import DataConfig, TrainConfig
from specjax.training.dry_run import abstract_run, needs
from specjax.training.methods import Eagle3Training
from tests.conftest import tiny_target

DATA = DataConfig(window=16, batch=4)


def config(directory, **changes) -> TrainConfig:
    return TrainConfig(method=Eagle3Training(target=str(directory)), data=DATA, **changes)


def shapes(params) -> list:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype) for path, leaf in leaves]


@pytest.mark.full
@pytest.mark.parametrize("weights", ["float", "int8", "w8a8", "int4", "fp8"])
def test_a_quantized_target_takes_what_it_takes_when_it_is_loaded(weights, tmp_path) -> None:
    """Check a checkpoint, and its config.json alone."""
    # 128 is the size of a group of 4-bit weights, and of an FP8 block.
    target = tiny_target(hidden_size=128, num_heads=4, head_dim=32, intermediate_size=128)
    target = target if weights == "float" else target.quantize(weights)
    target.save_pretrained(tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "alone")
    loaded = Target.from_pretrained(tmp_path / "whole", dtype="bfloat16")
    for name in ("whole", "alone"):
        run = abstract_run(config(tmp_path / name, compute_dtype="bfloat16"))
        assert shapes(run.target.params) == shapes(loaded.params)


@pytest.mark.full
def test_the_peak_is_that_of_a_step_or_of_an_evaluation() -> None:
    whole, parts = (needs(config("embedded", accumulate=accumulate)) for accumulate in (1, 4))
    step, evaluation = whole.inner.values()
    assert whole.peak == sum(whole.memory.values()) + max(step, evaluation)
    assert list(parts.inner.values())[1] < evaluation  # it reads fewer rows at once
    held_out = abstract_run(config("embedded", accumulate=4)).held_out
    assert held_out["tokens"].shape == (1, 17)


@pytest.mark.thorough
def test_a_mesh_divides_what_a_device_holds(tmp_path, capsys) -> None:
    (tmp_path / "run.yaml").write_text(
        "output: run\nmethod: {name: eagle3, target: embedded}\ndata: {window: 16, batch: 4}\n"
    )
    command = ["train", "--config", str(tmp_path / "run.yaml"), "--dry-run"]
    assert main(command) == 0
    single = capsys.readouterr().out
    assert main([*command, "--mesh", "2", "2"]) == 0
    four = capsys.readouterr().out
    assert "on one device" in single
    assert "on each of 4 devices" in four

    def megabytes(out: str, name: str) -> float:
        line = next(line for line in out.splitlines() if f" {name} " in line)
        return float(line.split("│")[2].replace(",", ""))

    for name in ("target", "student", "optimiser"):
        assert megabytes(four, name) < 0.75 * megabytes(single, name)
    assert "inner values of an evaluation" in four
