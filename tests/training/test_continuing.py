"""A run continues with another execution: its losses are those of an unbroken run."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.config import ConfigError, load_yaml
from specjax.training import loop, step
from specjax.training.config import OptimizerConfig, TrainConfig
from specjax.training.contract import row_keys
from specjax.training.methods import Eagle1Training, Lm
from specjax.training.optimizer import learning_rates
from tests.conftest import save_tiny
from tests.training.test_loop import (
    SIZES,
    assert_same_runs,
    config,
    metrics_of,
    stopping_at,
    write_texts,
)

STEPS, STOP, SAVED = 20, 7, 6


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=20)


def run_of(source: str, output: Path, **changes) -> TrainConfig:
    run = config(source, output, steps=STEPS, checkpoint_every=SAVED, evaluate_every=10)
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=2)
    return replace(run, optimizer=optimizer, logging="none", **changes)


def lines_of(output: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps."""
    return [line for line in metrics_of(output) if "loss" in line]


def losses_of(output: Path) -> list[float]:
    return [line["loss"] for line in lines_of(output)]


def break_off(run: TrainConfig, monkeypatch, last: int = STOP) -> None:
    """Run until a kill after step ``last``."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "train_step", stopping_at(last))
        loop.train(run)


@pytest.fixture(scope="module")
def unbroken(source, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("unbroken") / "run"
    loop.train(run_of(source, output))
    return output


CHANGES = {
    "how often and for whom": {
        "evaluate_every": 5,
        "checkpoint_every": 4,
        "export_dtype": "bfloat16",
        "logging": "tensorboard",
        "checkpoints": 3,
    },
    "accumulate": {"accumulate": 2},
    "remat": {"method": Lm(model=SIZES, remat=True)},
    "mesh": {"mesh": (2, 2)},
}


@pytest.mark.full
@pytest.mark.thorough_except("how often and for whom", "accumulate")
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_continues_with_another_execution(
    source, unbroken, tmp_path, monkeypatch, name
) -> None:
    """Check each loss of 20 steps, and that the run can go back to what it was.

    Losses before the stop are exact. Behind it they are exact where the computation is the same.
    """
    run = run_of(source, tmp_path / "run")
    changed = replace(run, **CHANGES[name])
    break_off(run, monkeypatch)
    break_off(changed, monkeypatch, last=STOP + 8)
    assert load_yaml(TrainConfig, tmp_path / "run" / "config.yaml") == changed
    loop.train(run)
    losses, expected = losses_of(tmp_path / "run"), losses_of(unbroken)
    assert len(losses) == STEPS
    if name == "how often and for whom":
        assert losses == expected
        weights, whole = (
            load_file(output / "latest" / "model.safetensors")
            for output in (tmp_path / "run", unbroken)
        )
        for key, value in whole.items():
            np.testing.assert_array_equal(weights[key], value)
    else:
        assert losses[:SAVED] == expected[:SAVED]
        # It was another computation. (With remat, a CPU may come to the same bits.)
        assert name == "remat" or losses[SAVED:] != expected[SAVED:]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_a_row_keeps_its_random_key_in_a_part_of_a_batch() -> None:
    batch = {"tokens": jnp.zeros((6, 5), int), "key": jax.random.key(3), "progress": jnp.ones(())}
    keys = jax.random.key_data(row_keys(batch))
    parts = step._parts(batch, 3)
    for part in range(3):
        rows = row_keys({name: value[part] for name, value in parts.items()})
        np.testing.assert_array_equal(jax.random.key_data(rows), keys[part::3])


@pytest.mark.full
def test_noise_of_a_step_does_not_depend_on_the_parts_of_a_batch(tmp_path, source) -> None:
    """Check a method that adds noise to the features, without a first part that is the same."""
    save_tiny(tmp_path / "target", num_layers=1)
    method = Eagle1Training(target=str(tmp_path / "target"))
    run = replace(run_of(source, tmp_path / "whole"), method=method, steps=3)
    run = replace(run, data=replace(run.data, window=16))
    loop.train(run)
    loop.train(replace(run, output=str(tmp_path / "parts"), accumulate=2))
    np.testing.assert_allclose(
        losses_of(tmp_path / "parts"), losses_of(tmp_path / "whole"), rtol=1e-4
    )


@pytest.mark.full
def test_steps_may_grow_and_the_schedule_with_them(source, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(loop, "say", print)
    run = run_of(source, tmp_path / "run", method=Lm(model=SIZES))
    short = replace(run, steps=8, checkpoint_every=4, evaluate_every=100)
    loop.train(short)
    with pytest.raises(ConfigError, match=r"steps: 8 -> 7\); steps may only grow"):
        loop.train(replace(short, steps=7))
    capsys.readouterr()
    loop.train(replace(short, steps=12))
    printed = capsys.readouterr().out
    assert "the run continues after step 8 of 12" in printed
    assert "changed since its last start: steps: 8 -> 12" in printed
    old, new = (learning_rates(run.optimizer, steps) for steps in (8, 12))
    assert f"{new[8]:.3g} at step 9, after {old[7]:.3g} at step 8" in printed
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "run")]
    np.testing.assert_allclose(rates, [*old, *new[8:]], rtol=1e-6)
    with pytest.raises(ConfigError, match=r"steps: 12 -> 8\); steps may only grow"):
        loop.train(short)


def test_what_is_learnt_may_not_change(source, unbroken, tmp_path) -> None:
    run = run_of(source, unbroken)
    for changed in (
        replace(run, data=replace(run.data, batch=8)),
        replace(run, compute_dtype="bfloat16"),
        replace(run, optimizer=replace(run.optimizer, learning_rate=1e-3)),
    ):
        with pytest.raises(ConfigError, match="a run with another configuration"):
            loop.train(changed)


@pytest.mark.full
def test_resume_says_whether_a_run_is_continued(source, unbroken, tmp_path, monkeypatch) -> None:
    run = run_of(source, unbroken)
    with pytest.raises(ConfigError, match=r"resume='never': output=.* has a run; choose another"):
        loop.train(replace(run, resume="never"))
    loop.train(replace(run, resume="must"))  # it is complete
    new = run_of(source, tmp_path / "new", resume="must")
    with pytest.raises(ConfigError, match=r"resume='must': output=.* has no run to continue"):
        loop.train(new)
    assert not (tmp_path / "new").exists()
    break_off(replace(new, resume="never"), monkeypatch, last=1)
    with pytest.raises(ConfigError, match=r"resume='must': .* has no checkpoint yet"):
        loop.train(new)
    loop.train(replace(new, resume="auto"))
    assert_same_runs(tmp_path / "new", unbroken)
