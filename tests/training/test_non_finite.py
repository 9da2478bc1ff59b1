"""A run with NaN or infinity ends at that step, and saves nothing of it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from specjax.cli.main import main
from specjax.config import dump_yaml
from specjax.errors import NonFiniteError
from specjax.training import loop, step
from specjax.training.config import OptimizerConfig
from specjax.training.methods import Lm
from tests.training.test_loop import SIZES, config, metrics_of, write_texts

BAD, STEPS = 6, 8


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=20)


@dataclass(frozen=True)
class BadLm(Lm):
    """Language modelling with a loss, or gradients alone, that are NaN at one step."""

    bad: str = "loss"

    def objective(self, student, batch, target):
        loss, metrics = super().objective(student, batch, target)
        is_bad = jnp.abs(batch["progress"] * STEPS - BAD) < 0.5
        # At 0 the square root has an infinite derivative.
        zero = jax.lax.stop_gradient(loss) - loss
        endless = 0 * jnp.sqrt(jnp.where(is_bad, zero, zero + 1))
        loss += endless if self.bad == "gradients" else jnp.where(is_bad, jnp.nan, 0)
        return loss, {**metrics, "loss": loss}


def assert_finite_until(output: Path, last: int) -> None:
    """Check the files of a run whose last good checkpoint is of step ``last``."""
    for name in ("best", "latest"):
        for array in load_file(output / name / "model.safetensors").values():
            assert np.isfinite(array).all()
    with ocp.CheckpointManager((output / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == last
    for line in metrics_of(output):
        assert all(np.isfinite(value) for value in line.values())


@pytest.mark.full
@pytest.mark.parametrize("bad", ["loss", "gradients"])
def test_a_run_ends_at_the_step_whose_loss_or_gradients_are_nan(source, tmp_path, bad) -> None:
    run = config(
        source,
        tmp_path / "run",
        method=BadLm(model=SIZES, bad=bad),
        steps=STEPS,
        checkpoint_every=2,
        evaluate_every=2,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    )
    what = "loss nan" if bad == "loss" else "gradient_norm nan"
    with pytest.raises(NonFiniteError, match=f"step {BAD}: .*{what}.*init_from=") as raised:
        loop.train(run)
    assert raised.value.step == BAD
    assert_finite_until(tmp_path / "run", last=BAD - 2)
    assert max(line["step"] for line in metrics_of(tmp_path / "run")) == BAD - 1


@pytest.mark.full
def test_weights_that_are_not_finite_are_never_saved(source, tmp_path, monkeypatch, capsys) -> None:
    """Check an update that overflows although its gradients are finite, by the command line."""

    def overflowing(state, *arguments, **options):
        state, metrics = step.train_step(state, *arguments, **options)
        if int(state.step) == 4:
            params = state.student.params
            params = {**params, "norm": params["norm"].at[3].set(jnp.inf)}
            state = state.replace(student=state.student.replace(params=params))
        return state, metrics

    monkeypatch.setattr(loop, "train_step", overflowing)
    run = config(source, tmp_path / "run", steps=4, checkpoint_every=2, evaluate_every=2)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(run))
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "step 4: the training has a number that is not finite (a weight" in error
    assert_finite_until(tmp_path / "run", last=2)


@pytest.mark.full
def test_a_held_out_figure_that_is_not_finite_ends_the_run(source, tmp_path, monkeypatch) -> None:
    figures = iter([{"loss": 3.0}, {"loss": float("nan")}])
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: next(figures))
    run = config(source, tmp_path / "run", steps=6, checkpoint_every=2, evaluate_every=2)
    with pytest.raises(NonFiniteError, match=r"step 4: .*held_out_loss nan"):
        loop.train(run)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    held_out = [json.loads(line).get("held_out_loss") for line in lines]
    assert [figure for figure in held_out if figure is not None] == [3.0]


@pytest.mark.full
def test_the_run_after_it_may_begin_with_its_last_student(source, tmp_path) -> None:
    """Check the remedy that the message names."""
    run = config(
        source,
        tmp_path / "run",
        method=BadLm(model=SIZES),
        steps=STEPS,
        checkpoint_every=2,
        evaluate_every=2,
    )
    with pytest.raises(NonFiniteError) as raised:
        loop.train(run)
    latest = str(raised.value).partition("init_from='")[2].partition("'")[0]
    again = replace(run, output=str(tmp_path / "again"), init_from=latest, method=Lm(model=SIZES))
    loop.train(replace(again, steps=2))
    assert [line["step"] for line in metrics_of(tmp_path / "again") if "loss" in line] == [1, 2]
