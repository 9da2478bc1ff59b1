"""A layer with a short convolution against one that goes token by token: texts and trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models.memory import LayerMemory, ShortConvolution
from specjax.models.short_convolution import short_convolution
from specjax.models.states import State
from specjax.planning import work
from tests.conftest import tiny_config, tiny_target
from tests.models.state_layers import StateLayer, of_newest


def alone(params, sizes: ShortConvolution, eps: float, x: np.ndarray) -> np.ndarray:
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}

    def projected(name: str, inputs: np.ndarray) -> np.ndarray:
        return inputs @ params[name] + params.get(f"{name}_bias", 0.0)

    before, after, value = (projected(name, x) for name in ("gate_in", "gate_out", "value"))
    bias = params.get("conv_value_bias", 0.0)
    weight = params["conv_value"]
    mixed = [of_newest(before * value, weight, t) + bias for t in range(len(x))]
    return projected("o", after * np.array(mixed))


SIZES = ShortConvolution(channels=16)
LAYERS = {
    "as published": StateLayer(SIZES, short_convolution, "conv.", alone),
    "with biases": StateLayer(
        ShortConvolution(channels=16, kernel=5, bias=True), short_convolution, "conv.", alone
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_text_is_as_token_by_token(name) -> None:
    LAYERS[name].check_text()


@pytest.mark.parametrize("name", LAYERS)
def test_in_a_tree_each_node_is_as_its_path_and_an_accepted_path_is_written(name) -> None:
    LAYERS[name].check_tree()


def test_below_drafted_nodes_in_scratch_each_node_is_as_its_path() -> None:
    LAYERS["with biases"].check_below_drafted()


def test_documents_do_not_see_each_other() -> None:
    LAYERS["as published"].check_documents()


def test_the_state_has_the_newest_inputs_and_nothing_else() -> None:
    state = State.zeros(SIZES, 3, jnp.bfloat16)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] == [
        ((3, 8, 2, 2), jnp.bfloat16)
    ]
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert stored == 3 * SIZES.state_bytes(2)


CONFIG = {"linear": SIZES, "linear_layers": (0, 2), "num_layers": 3, "qk_norm": True}


def test_the_roofline_counts_the_newest_inputs() -> None:
    config = tiny_config(**CONFIG, model_type="lfm2")
    assert [config.memory(layer) for layer in (0, 2)] == [LayerMemory((), SIZES)] * 2
    assert work.state_bytes(config, 2) == 2 * (2 * 16 * 2)
    entry = 2 * config.num_kv_heads * config.head_dim * 2
    assert work.node_bytes(config, 2, 2) == entry + 2 * (16 * 2)
    # A commit writes no table: it has no arithmetic, but reads and writes the inputs, and so are
    # the entries of three tokens.
    assert work.commit_work(config, batch=2, tokens=3) == work.Work(0.0, 2 * 2 * (128 + 3 * 64))
    cache = tiny_target(**CONFIG, model_type="lfm2").new_cache(2, 8)
    assert [state is None for state in cache.states] == [False, True, False]


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="kernel=1: must be at least 2 tokens"):
        ShortConvolution(channels=16, kernel=1)
    with pytest.raises(InputError, match="channels=0: must be at least 1"):
        ShortConvolution(channels=0)
