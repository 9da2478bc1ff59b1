"""Two processes, and eight devices of one, train a drafter as one device does."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.training import loop
from tests.conftest import save_tiny
from tests.processes import processes, wait
from tests.training import two_processes


@pytest.fixture
def directory(tmp_path):
    save_tiny(tmp_path / "target", num_layers=1)
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.py").write_text(
            "".join(f"def function_{i}_{j}(self): return {j}\n" for j in range(9))
        )
    return tmp_path


def curve(directory, output) -> list[list[float]]:
    """Return the numbers that a run reported of its loss, on both kinds of windows."""
    lines = [
        json.loads(line) for line in (directory / output / "metrics.jsonl").read_text().splitlines()
    ]
    names = ("loss", "gradient_norm", "held_out_acceptance_length_sampled")
    return [[line[name] for line in lines if name in line] for name in names]


def assert_same_runs(directory: Path, output: str) -> None:
    """Check that the run in ``output`` went as the one on one device, in ``one``."""
    alone = curve(directory, "one")
    assert len(alone[0]) == 6
    for expected, numbers in zip(alone, curve(directory, output), strict=True):
        np.testing.assert_allclose(numbers, expected, rtol=1e-3, err_msg=output)
    expected, weights = (
        load_file(directory / run / "latest" / "model.safetensors") for run in ("one", output)
    )
    assert weights.keys() == expected.keys()
    np.testing.assert_array_equal(weights["d2t"], expected["d2t"])
    np.testing.assert_allclose(
        weights["fc.weight"], expected["fc.weight"], atol=2e-3, err_msg=output
    )


# Decoding in two processes and training on a mesh are tested every time.
@pytest.mark.thorough
def test_a_drafter_learns_the_same_on_one_device_and_in_two_processes(directory) -> None:
    with processes(two_processes.__name__, directory) as running:
        loop.train(two_processes.config(directory, "one", (1, 1)))
        wait(running, directory)
    for output in ("data", "model"):
        assert_same_runs(directory, output)


@pytest.mark.thorough
def test_a_drafter_learns_the_same_on_eight_devices(directory) -> None:
    loop.train(two_processes.config(directory, "one", (1, 1)))
    loop.train(two_processes.config(directory, "eight", (4, 2)))
    assert_same_runs(directory, "eight")
