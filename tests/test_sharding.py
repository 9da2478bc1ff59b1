"""Compare one device with eight (2 x 4)."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import specjax
from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel, EarlyExit
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.models import params
from specjax.models.config import Layer
from specjax.sampling import Sampling
from tests.conftest import ASSETS, LAYERED, compilations, tiny_config, tiny_target


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
        place.shard_shape(param.shape)  # raises if it does not divide


def test_each_layer_is_split_by_its_own_heads() -> None:
    config = tiny_config(num_heads=8, num_kv_heads=4, layers=(Layer(), Layer(num_kv_heads=2)))
    mesh = sharding.make_mesh(2, 4)
    first, second = params.shardings(params.declare(config), mesh, config.axis_units)["layers"]
    assert first["k"].spec == PartitionSpec(None, "model")
    assert second["k"].spec == PartitionSpec(None, None)
    assert first["o"].spec == second["o"].spec == PartitionSpec("model", None)
    assert (config.axis_units["heads"], config.axis_units["kv_heads"]) == (8, 2)


@pytest.mark.full
@pytest.mark.parametrize("which", LAYERED)
def test_logits_of_layers_that_differ_are_the_same_on_a_mesh(which) -> None:
    target, mesh = tiny_target(**LAYERED[which]), sharding.make_mesh(2, 4)
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    split = target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    tokens = np.random.default_rng(2).integers(0, 11, (2, 9))

    @jax.jit
    def logits(target):
        _, cache = target.forward(tokens[:, :6], target.new_cache(2, 16))
        return target.forward(tokens[:, 6:], cache)[0].logits

    np.testing.assert_allclose(logits(split), logits(target), atol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    tiny_target(num_heads=8, num_kv_heads=4, vocab_size=12, intermediate_size=24).save_pretrained(
        path
    )
    return path


def test_loading_onto_a_mesh_reads_slices(checkpoint) -> None:
    whole = specjax.Target.from_pretrained(checkpoint, dtype=np.float32)
    split = specjax.Target.from_pretrained(
        checkpoint, dtype=np.float32, mesh=sharding.make_mesh(2, 4)
    )
    q = split.params["layers"][0]["q"]
    assert q.addressable_shards[0].data.shape == (q.shape[0], q.shape[1] // 4)
    jax.tree.map(np.testing.assert_array_equal, whole.params, split.params)


@pytest.mark.full
@pytest.mark.parametrize("which", ["tiny", pytest.param("embedded", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name",
    [
        None,
        "dynamic tree",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("draft model", "early exit")),
    ],
)
def test_greedy_tokens_are_the_same_on_one_device_and_on_eight(checkpoint, which, name) -> None:
    path, draft = (
        (checkpoint, checkpoint) if which == "tiny" else (ASSETS / "target", ASSETS / "draft")
    )

    def run(mesh):
        target = specjax.Target.from_pretrained(path, dtype=np.float32, mesh=mesh)
        drafters = {
            None: None,
            "draft model": DraftModel.from_pretrained(
                draft, draft=Chain(3), dtype=np.float32, mesh=mesh
            ),
            "dynamic tree": DraftModel.from_pretrained(
                draft, draft=DynamicTree(3, 3, 8), dtype=np.float32, mesh=mesh
            ),
            "early exit": EarlyExit(layers=1, draft=Chain(2)),
        }
        prompts = np.arange(12).reshape(4, 3) % target.config.vocab_size
        result = specjax.generate(
            target, drafters[name], prompts, max_new_tokens=40, sampling=Sampling(temperature=0.0)
        )
        return np.asarray(result.tokens)

    np.testing.assert_array_equal(run(None), run(sharding.make_mesh(2, 4)))


@pytest.mark.full
def test_the_cache_is_sharded_and_streaming_compiles_once(checkpoint) -> None:
    mesh = sharding.make_mesh(2, 4)
    target = specjax.Target.from_pretrained(checkpoint, dtype=np.float32, mesh=mesh)
    prompts = np.arange(12).reshape(4, 3)
    _, state = decoding.start(target, None, prompts, options=GenerationOptions(max_new_tokens=20))
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
