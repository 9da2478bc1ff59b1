import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.demo import inflate
from specjax.drafters import DraftModel
from specjax.errors import InputError
from specjax.models.config import Layer, Rope
from specjax.models.params import count
from specjax.models.transformer import Target
from tests.conftest import ASSETS, LAYERED, tiny_target

LARGER = {"hidden_size": 48, "intermediate_size": 80, "num_layers": 5}


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        {},
        {"tie_embeddings": True},
        {"model_type": "qwen2", "qkv_bias": True},
        {
            "model_type": "smollm3",
            "sliding_window": 6,
            "windowed_layers": (0,),
            "layers": (Layer(), Layer(rope=Rope(kind="none"))),
        },
        {
            "model_type": "qwen3",
            "qk_norm": True,
            "output_bias": True,
            "mlp_bias": True,
            "norm_eps": 1e-9,
        },
    ],
    ids=["llama", "tied", "qwen2", "smollm3", "qwen3"],
)
def test_logits_stay_the_same(family) -> None:
    small = tiny_target(**family)
    large = inflate(small, **LARGER)
    assert large.config.num_heads == 12
    assert large.config.num_kv_heads == 6
    assert count(large.params) > 5 * count(small.params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 30)))
    np.testing.assert_allclose(
        large.forward(tokens)[0].logits, small.forward(tokens)[0].logits, atol=1e-4
    )


def test_an_inflated_checkpoint_is_an_ordinary_one(tmp_path) -> None:
    large = inflate(tiny_target(), **LARGER)
    large.save_pretrained(tmp_path)
    again = Target.from_pretrained(tmp_path, dtype=np.float32)
    assert again.config == large.config
    jax.tree.map(np.testing.assert_array_equal, again.params, large.params)


@pytest.mark.thorough
def test_text_and_acceptance_of_the_embedded_pair_stay_the_same() -> None:
    small = Target.from_pretrained(ASSETS / "target", dtype=np.float32)
    drafter = DraftModel.from_pretrained(ASSETS / "draft", dtype=np.float32)
    large = inflate(small, hidden_size=256, intermediate_size=640, num_layers=14)
    prompt = [[0, 500, 40, 41]]
    expected, got = (
        specjax.generate(target, drafter, prompt, max_new_tokens=60) for target in (small, large)
    )
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.stats.histogram, expected.stats.histogram)


def test_shrinking_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match="num_layers=1: a model can only be inflated, and the target has 2"
    ):
        inflate(tiny_target(), **LARGER | {"num_layers": 1})
    with pytest.raises(InputError, match=r"cannot be inflated: give one with .* and windows$"):
        inflate(tiny_target(**LAYERED["differing"]), **LARGER)
