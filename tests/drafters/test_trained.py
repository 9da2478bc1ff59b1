"""Test what the checkpoints of all trained drafters have in common.

They are loaded in the same way, and counts in config.json must agree with the tensors.
"""

import json
import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import MTP, DraftModel, Eagle, Eagle3, Medusa, MixtureOfAttentions
from specjax.drafters.registry import METHODS
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.conftest import MIXTURES, tiny_config, tiny_target

TRAINED = {name: method.trained for name, method in METHODS.items() if method.trained}


@pytest.mark.full
@pytest.mark.parametrize("kind", [Target, DraftModel, *TRAINED.values()])
def test_nothing_but_the_path_is_given_by_position(tmp_path, kind) -> None:
    """Check that a data type as second argument is refused.

    It was once taken for the shape of the drafts.
    """
    target = tiny_target()
    model = target if kind is Target else kind.init(target, jax.random.key(0))
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="positional"):
        model.save_pretrained(tmp_path, jnp.bfloat16)
    with pytest.raises(TypeError, match="positional argument"):
        kind.from_pretrained(tmp_path, jnp.float32)
    read = kind.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(read)}
    assert dtypes - {np.dtype("int32")} == {jnp.dtype("bfloat16")}


@pytest.mark.full
@pytest.mark.thorough_except("dflash2", "dflash", "dspark", "eagle-lsa", "gemma4-assistant")
@pytest.mark.parametrize("name", TRAINED)
def test_it_is_loaded_with_its_own_draft_or_with_the_one_asked_for(tmp_path, name) -> None:
    drafter = TRAINED[name].init(tiny_target(), jax.random.key(0))
    drafter.save_pretrained(tmp_path)
    assert type(drafter).from_pretrained(tmp_path).draft == drafter.draft
    assert type(drafter).from_pretrained(tmp_path, draft=Chain(2)).draft == Chain(2)
    recognising = [
        method
        for method, kind in TRAINED.items()
        if kind.checkpoint_format.recognises(*described(tmp_path))
    ]
    assert recognising[0] == name
    with pytest.raises(
        InputError,
        match=(
            rf"layout='papyrus': {drafter.title} is written in the layouts?"
            rf" '{drafter.layouts[0]}'"
        ),
    ):
        drafter.save_pretrained(tmp_path, layout="papyrus")


@pytest.mark.parametrize("kind", TRAINED.values())
def test_an_option_that_there_is_not_is_named_before_anything_is_read(tmp_path, kind) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^{kind.__name__}\.from_pretrained\(\) got an unexpected keyword argument 'dtpye'",
    ):
        kind.from_pretrained(tmp_path / "nothing", dtpye=jnp.float32)


LAYOUTS = [(name, layout) for name, kind in TRAINED.items() for layout in kind.layouts]
LAYOUTS.remove(("dflash", "deepspec"))  # it is for drafters with an embedding of their own


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_ids_beyond_a_drafters_vocabulary_are_left_out(tmp_path, name, layout) -> None:
    """Check that end tokens beyond the vocabulary are ignored, because a drafter's are never used.

    Published drafters have the end tokens of a target with a larger vocabulary.
    """
    drafter = TRAINED[name].init(tiny_target(), jax.random.key(0))
    drafter.save_pretrained(tmp_path, layout=layout)
    content = json.loads((tmp_path / "config.json").read_text())
    before = type(drafter).from_pretrained(tmp_path).config

    def with_foreign_ids(fields: dict) -> dict:
        changed = {
            key: with_foreign_ids(value) if isinstance(value, dict) else value
            for key, value in fields.items()
        }
        if "vocab_size" in fields:
            changed |= {"bos_token_id": 128_000, "eos_token_id": 128_001}
        return changed

    foreign = json.dumps(with_foreign_ids(content))
    (tmp_path / "config.json").write_text(foreign)
    read = type(drafter).from_pretrained(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, read.params, drafter.params))
    assert type(read.config) is type(before)
    (tmp_path / "config.json").write_text(foreign.replace("128001", "[3, 128001]"))
    type(drafter).from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(foreign.replace("128001", '"</s>"'))
    if name != "medusa":  # its config.json does not describe a model
        with pytest.raises(CheckpointError, match="eos_token_id='</s>': must be a token id"):
            type(drafter).from_pretrained(tmp_path)


def described(directory):
    stored = CheckpointFiles(directory)
    return stored.raw, stored.shapes


# --- counts ---------------------------------------------------------------------------------------


def tiny(directory, tensors: dict[str, tuple[int, ...]], content: dict) -> None:
    """Write a very small checkpoint, with a tensor of each shape."""
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in tensors.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(content))
    assert sum(file.stat().st_size for file in directory.iterdir()) < 20_000


def refused_in_little_memory(kind, directory, words: str) -> None:
    """Check that a checkpoint is refused for a count, with less than a megabyte of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            kind.from_pretrained(directory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def config_of(drafter, tmp_path) -> dict:
    drafter.save_pretrained(tmp_path / "whole")
    return json.loads((tmp_path / "whole" / "config.json").read_text())


def test_modules_are_counted_before_they_are_declared(tmp_path) -> None:
    content = config_of(MTP.init(tiny_target(), jax.random.key(0)), tmp_path)
    tiny(
        tmp_path,
        {"model.mtp_layers.0.input_proj.weight": (1, 1)},
        content | {"num_nextn_predict_layers": 100},
    )
    refused_in_little_memory(
        MTP, tmp_path, "num_nextn_predict_layers=100, but there are tensors of 1 modules"
    )
    tiny(
        tmp_path,
        {f"model.mtp_layers.{module}.input_proj.weight": (1, 1) for module in (0, 99)},
        content | {"num_nextn_predict_layers": 100},
    )
    refused_in_little_memory(MTP, tmp_path, "there are tensors of 2 modules")


def deepseek(tmp_path) -> tuple[dict, str]:
    """Return the config.json of a checkpoint, and the start of the names of its module's tensors.

    The target has two layers, and its module has eight experts.
    """
    config = tiny_config(**MIXTURES["deepseek_v3"])
    drafter = MTP.init(tiny_target(), jax.random.key(0))
    layer = replace(config, num_layers=1)
    module_config = replace(drafter.config, layer=layer, layout="deepseek", first_layer=2)
    declared = MTP.checkpoint_format.declare(module_config, "mtp")
    params = jax.tree.map(lambda param: jnp.ones(param.shape, param.dtype or "float32"), declared)
    saved = drafter.replace(config=module_config, params=params)
    content = config_of(saved, tmp_path)
    assert MTP.from_pretrained(tmp_path / "whole").config == module_config
    return content, "model.layers.2."


def test_experts_are_counted_before_they_are_declared(tmp_path) -> None:
    content, prefix = deepseek(tmp_path)
    tensors = {
        f"{prefix}eh_proj.weight": (1, 1),
        f"{prefix}mlp.experts.9999.up_proj.weight": (1, 1),
    }
    many = {"n_routed_experts": 10_000, "n_group": 1, "topk_group": 1}
    tiny(tmp_path, tensors, content | many)
    refused_in_little_memory(
        MTP, tmp_path, "the number of experts=10000, but there are tensors of 1 experts in module 0"
    )
    modules = {f"model.layers.{2 + module}.eh_proj.weight": (1, 1) for module in range(100)}
    tiny(tmp_path, modules, content | {"num_nextn_predict_layers": 100})
    refused_in_little_memory(
        MTP, tmp_path, "the number of experts=8, but there are tensors of 0 experts in module 0"
    )


def test_a_module_s_number_of_any_length_is_one_line(tmp_path) -> None:
    """Check a number of thousands of digits, which makes Python raise an error of its own."""
    deepseek(tmp_path)
    weights = tmp_path / "whole" / "model.safetensors"
    long = f"model.layers.{'1' * 5000}.eh_proj.weight"
    save_file(load_file(weights) | {long: np.zeros((1, 1), np.float32)}, weights)
    with pytest.raises(
        CheckpointError,
        match=r"'model\.layers\.1+\.\.\.1+\.eh_proj\.weight' is no part of the MTP modules",
    ):
        MTP.from_pretrained(tmp_path / "whole")


def test_heads_are_counted_before_they_are_declared(tmp_path) -> None:
    output = {"0.100.weight": (1, 1)}
    tiny(tmp_path, output, {"medusa_num_heads": 100, "medusa_num_layers": 100})
    refused_in_little_memory(
        Medusa, tmp_path, "medusa_num_heads=100, but there are tensors of 1 heads"
    )
    tiny(
        tmp_path,
        {f"{head}.100.weight": (1, 1) for head in range(100)},
        {"medusa_num_heads": 1, "medusa_num_layers": 100},
    )
    refused_in_little_memory(
        Medusa, tmp_path, "medusa_num_layers=100, but there are tensors of 0 blocks in head 0"
    )


@pytest.mark.full
def test_layers_and_taps_are_counted_before_they_are_declared(tmp_path) -> None:
    content = config_of(Eagle3.init(tiny_target(), jax.random.key(0), ids=np.arange(5)), tmp_path)
    tensors = {"midlayer.self_attn.q_proj.weight": (1, 1), "fc.weight": (1, 48)}
    tiny(tmp_path, tensors, content | {"num_hidden_layers": 10_000})
    refused_in_little_memory(
        Eagle3, tmp_path, "num_hidden_layers=10000, but there are tensors of 1 layers"
    )
    no_bytes = tensors | {"fc.weight": (0, 16_000_000)}
    tiny(tmp_path, no_bytes, content | {"fc_norm": True, "eagle_config": None})
    refused_in_little_memory(
        Eagle3, tmp_path, r"fc\.weight joins 1000000 layers .* there are tensors of 0 norms"
    )


def test_a_target_of_any_size_declares_nothing(tmp_path) -> None:
    """Check that sizes of the target in config.json are only compared with the target.

    Reading the drafter allocates nothing for them.
    """
    drafter = MixtureOfAttentions.init(tiny_target(), jax.random.key(0))
    content = config_of(drafter, tmp_path)
    moa_config = content["moa_config"]
    lsa = moa_config["layer_self_attention"] | {"target_num_hidden_layers": 10_000}
    changed = {
        "target_num_hidden_layers": 10_000,
        "target_layer_inference": 9_999,
        "layer_self_attention": lsa,
    }
    (tmp_path / "whole" / "config.json").write_text(
        json.dumps(content | {"moa_config": moa_config | changed})
    )
    tracemalloc.start()
    read = MixtureOfAttentions.from_pretrained(tmp_path / "whole")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(jax.tree.leaves(read.params)) == len(jax.tree.leaves(drafter.params))
    with pytest.raises(InputError, match=r"\(11, 16, 10000\), but target has \(11, 16, 2\)"):
        read.check(tiny_target())


def test_a_drafter_with_layer_self_attention_says_how_it_is_loaded(tmp_path) -> None:
    drafter = TRAINED["eagle-lsa"].init(tiny_target(), jax.random.key(0))
    drafter.save_pretrained(tmp_path)
    assert "layer_self_attention.self_attn.q_proj.weight" in load_file(
        tmp_path / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match="load it with EagleWithLayerAttention, or as eagle-lsa:DIRECTORY"
    ):
        Eagle.from_pretrained(tmp_path)
