"""One device against eight (2 x 4)."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import specjax
from specjax import sharding
from specjax.decoding import engine
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel, EarlyExit
from specjax.errors import InputError
from specjax.models import params
from specjax.sampling import Sampling
from specjax.tree import Chain, DynamicTree
from tests.conftest import ASSETS, compilations, tiny_config, tiny_target


def test_an_axis_that_does_not_divide_stays_whole() -> None:
    mesh = sharding.make_mesh(2, 4)
    units = {"heads": 8, "kv_heads": 2, "mlp": 12}
    assert sharding.partition(mesh, ("heads", None), units) == PartitionSpec("model", None)
    assert sharding.partition(mesh, ("kv_heads", None), units) == PartitionSpec(None, None)
    assert sharding.partition(mesh, (None, "mlp"), units) == PartitionSpec(None, "model")


def test_every_parameter_has_a_sharding_of_its_own_rank() -> None:
    config = tiny_config(qkv_bias=True, qk_norm=True)
    mesh = sharding.make_mesh(2, 4)
    declared = params.declare(config)
    placed = jax.tree.leaves(params.shardings(declared, mesh, config.axis_units))
    declared = jax.tree.leaves(declared)
    assert len(declared) == len(placed)
    for param, place in zip(declared, placed, strict=True):
        assert len(place.spec) == len(param.shape)
        place.shard_shape(param.shape)  # raises where it does not divide


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    tiny_target(num_heads=8, num_kv_heads=4, vocab_size=12, intermediate_size=24).save_pretrained(path)
    return path


def test_loading_onto_a_mesh_reads_slices(checkpoint) -> None:
    whole = specjax.Target.from_pretrained(checkpoint, np.float32)
    split = specjax.Target.from_pretrained(checkpoint, np.float32, mesh=sharding.make_mesh(2, 4))
    q = split.params["layers"][0]["q"]
    assert q.addressable_shards[0].data.shape == (q.shape[0], q.shape[1] // 4)
    jax.tree.map(np.testing.assert_array_equal, whole.params, split.params)


@pytest.mark.parametrize("which", ["tiny", pytest.param("embedded", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name", [None, "dynamic tree", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("draft model", "early exit"))]
)
def test_greedy_tokens_are_the_same_on_one_device_and_on_eight(checkpoint, which, name) -> None:
    path, draft = (checkpoint, checkpoint) if which == "tiny" else (ASSETS / "target", ASSETS / "draft")

    def run(mesh):
        target = specjax.Target.from_pretrained(path, np.float32, mesh=mesh)
        drafters = {
            None: None,
            "draft model": DraftModel.from_pretrained(draft, draft=Chain(3), dtype=np.float32, mesh=mesh),
            "dynamic tree": DraftModel.from_pretrained(draft, DynamicTree(3, 3, 8), dtype=np.float32, mesh=mesh),
            "early exit": EarlyExit(layers=1, draft=Chain(2)),
        }
        prompts = np.arange(12).reshape(4, 3) % target.config.vocab_size
        result = specjax.generate(target, drafters[name], prompts, max_new_tokens=40, sampling=Sampling(temperature=0.0))
        return np.asarray(result.tokens)

    np.testing.assert_array_equal(run(None), run(sharding.make_mesh(2, 4)))


def test_the_cache_is_sharded_and_streaming_compiles_once(checkpoint) -> None:
    mesh = sharding.make_mesh(2, 4)
    target = specjax.Target.from_pretrained(checkpoint, np.float32, mesh=mesh)
    prompts = np.arange(12).reshape(4, 3)
    _, state = engine.start(target, None, prompts, options=GenerationOptions(max_new_tokens=20))
    keys = state.cache.layers[0][0]
    assert keys.sharding.shard_shape(keys.shape) == (2, 1, *keys.shape[2:])
    parts = specjax.stream(target, None, prompts, max_new_tokens=20, steps=3)
    next(parts)
    before = compilations()
    *_, last = parts
    assert np.all(last.lengths == 23)
    assert compilations() == before


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(InputError, match="data=2 x model=8 needs 16 devices; 8 are present"):
        sharding.make_mesh(2, 8)
