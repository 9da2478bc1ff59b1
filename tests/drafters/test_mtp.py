"""MTP modules in checkpoints: published names and habits, what is refused. What they draft is in `test_features`."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.drafters import MTP
from specjax.drafters.registry import load_drafter
from specjax.errors import InputError
from specjax.models.fields import CheckpointError
from specjax.tree import Chain
from tests.conftest import tiny_target

TEXT = np.array([[1, 4, 2, 4, 2, 7]])


@pytest.fixture
def target():
    return tiny_target(qkv_bias=True, model_type="qwen2")


@pytest.fixture
def beside_its_target(tmp_path, target):
    """A checkpoint as MiMo's: the modules' tensors among the target's."""
    drafter = MTP.init(target, jax.random.key(1), modules=2)
    target.save_pretrained(tmp_path)
    drafter.save_pretrained(tmp_path / "mtp")
    tensors = load_file(tmp_path / "model.safetensors") | load_file(tmp_path / "mtp" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 2}))
    return tmp_path, drafter


def assert_same(one: MTP, other: MTP) -> None:
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_modules_are_read_from_beside_their_target(beside_its_target, target) -> None:
    directory, drafter = beside_its_target
    names = set(load_file(directory / "model.safetensors"))
    assert {"model.mtp_layers.1.input_proj.weight", "model.mtp_layers.0.token_layernorm.weight"} < names
    read = MTP.from_pretrained(directory, dtype=jnp.float32)
    assert_same(read, drafter)
    assert isinstance(load_drafter(str(directory), Chain(2), target.config), MTP)
    specjax.generate(target, read, TEXT, max_new_tokens=4)


@pytest.mark.parametrize("deepseek", [False, True])
def test_what_is_written_is_read_again_bit_for_bit(tmp_path, target, deepseek) -> None:
    drafter = MTP.init(target, jax.random.key(1), modules=2)
    if deepseek:
        drafter = drafter.replace(config=replace(drafter.config, layout="deepseek", first_layer=2))
    drafter.save_pretrained(tmp_path)
    assert_same(MTP.from_pretrained(tmp_path, dtype=jnp.float32), drafter)
    if deepseek:
        assert "model.layers.3.eh_proj.weight" in load_file(tmp_path / "model.safetensors")


def mimo(tensors: dict[str, np.ndarray], hidden: np.ndarray, embedded: np.ndarray) -> np.ndarray:
    """What MiMo's own module gives at the first token of a text (where attention returns the token's value), in numpy."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[f"model.mtp_layers.0.{name}.weight"]

    def linear(x, name):
        bias = tensors.get(f"model.mtp_layers.0.{name}.bias", 0.0)
        return x @ tensors[f"model.mtp_layers.0.{name}.weight"].T + bias

    x = linear(np.concatenate([norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")]), "input_proj")
    value = linear(norm(x, "input_layernorm"), "self_attn.v_proj")
    x = x + linear(np.repeat(value.reshape(2, -1), 2, axis=0).reshape(-1), "self_attn.o_proj")  # 4 heads share 2
    y = norm(x, "post_attention_layernorm")
    gate = linear(y, "mlp.gate_proj")
    x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "final_layernorm")


def test_a_module_reads_the_hidden_state_first(beside_its_target, target) -> None:
    directory, drafter = beside_its_target
    tensors = load_file(directory / "model.safetensors")
    output = target.forward(TEXT[:, :1])[0]
    embedded = target.embed(TEXT[:, 1:2])
    ours, _ = drafter.run(output.hidden, embedded, jnp.zeros((1, 1), int), jnp.ones((1, 1, 1), bool), ((),))
    theirs = mimo(tensors, np.asarray(output.hidden[0, 0]), np.asarray(embedded[0, 0]))
    np.testing.assert_allclose(ours[0, 0], theirs, atol=1e-5)


def test_what_is_wrong_is_refused_by_name(beside_its_target, target) -> None:
    directory, drafter = beside_its_target
    tensors = load_file(directory / "model.safetensors")

    def keep(*left_out: str) -> None:
        kept = {name: value for name, value in tensors.items() if not any(part in name for part in left_out)}
        save_file(kept, directory / "model.safetensors")

    keep("mtp_layers.1.")
    with pytest.raises(CheckpointError, match=r"model\.mtp_layers\.1\.\S+' of the MTP modules with .* is missing"):
        MTP.from_pretrained(directory)
    keep("mtp_layers.1.input_proj")
    with pytest.raises(CheckpointError, match=r"mtp_layers\.1\.input_proj\.weight' .*missing"):
        MTP.from_pretrained(directory)
    keep("mtp_layers")
    with pytest.raises(CheckpointError, match="MTP modules were left out"):
        MTP.from_pretrained(directory)
    keep()
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    with pytest.raises(CheckpointError, match=r"model\.mtp_layers\.1\.\S+ is no part of"):
        MTP.from_pretrained(directory)
    with pytest.raises(InputError, match="count=3: there are 2 modules"):
        drafter.first(3)
    with pytest.raises(InputError, match="hidden size 16"):
        drafter.check(tiny_target(hidden_size=32))


def test_the_first_module_alone_goes_on_with_its_own_states(target) -> None:
    drafter = MTP.init(target, jax.random.key(1), Chain(3), modules=3)
    alone = drafter.first(1)
    assert alone.modules == 1 and len(alone.params["modules"]) == 1
    result = specjax.generate(target, alone, TEXT, max_new_tokens=8)
    np.testing.assert_array_equal(result.tokens, specjax.generate(target, None, TEXT, max_new_tokens=8).tokens)
