"""Windows that are read a few rows at a time give what a single pass over all rows gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.objectives import windows
from tests.conftest import tiny_target

ROWS, COUNT = 6, 12
TARGET = tiny_target(vocab_size=32, bos_token_id=None, eos_token_ids=())
SCORES_OF_ROW = 4 * TARGET.config.num_heads * COUNT**2


def batch():
    random = np.random.default_rng(0)
    segments = np.cumsum(random.random((ROWS, COUNT + 1)) < 0.2, axis=1)
    return {
        "tokens": jnp.asarray(random.integers(0, 32, (ROWS, COUNT + 1)), jnp.int32),
        "segments": jnp.asarray(segments, jnp.int32),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("bytes_of_scores", "rows_of_a_part"),
    [(3 * SCORES_OF_ROW, 3), (2.5 * SCORES_OF_ROW, 2), (1, 1)],
)
@pytest.mark.parametrize("taps", [(), (0, 1)])
def test_some_rows_at_a_time_give_the_same(
    bytes_of_scores, rows_of_a_part, taps, monkeypatch
) -> None:
    whole = windows.read(TARGET, batch(), taps)
    monkeypatch.setattr(windows, "SCORES_BYTES", bytes_of_scores)
    program = str(jax.make_jaxpr(lambda: windows.read(TARGET, batch(), taps))())
    hidden = TARGET.config.hidden_size
    assert f"f32[{rows_of_a_part},{COUNT},{hidden}]" in program
    in_parts = windows.read(TARGET, batch(), taps)
    assert jax.tree.structure(in_parts) == jax.tree.structure(whole)
    for part, expected in zip(jax.tree.leaves(in_parts), jax.tree.leaves(whole), strict=True):
        assert part.shape == expected.shape
        np.testing.assert_allclose(part, expected, atol=1e-5)
