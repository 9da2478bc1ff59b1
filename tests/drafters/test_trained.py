"""What all trained drafters' checkpoints have in common: how they are asked for, and counts that no tensor bears out."""

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


@pytest.mark.parametrize("kind", [Target, DraftModel, *TRAINED.values()])
def test_nothing_but_the_path_is_given_by_position(tmp_path, kind) -> None:
    """A data type in the second place became the shape of the drafts."""
    target = tiny_target()
    made = target if kind is Target else kind.init(target, jax.random.key(0))
    made.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="positional"):
        made.save_pretrained(tmp_path, jnp.bfloat16)
    with pytest.raises(TypeError, match="positional argument"):
        kind.from_pretrained(tmp_path, jnp.float32)
    read = kind.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(read)} - {np.dtype("int32")} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.parametrize("name", TRAINED)
def test_it_is_loaded_with_its_own_draft_or_with_the_one_asked_for(tmp_path, name) -> None:
    made = TRAINED[name].init(tiny_target(), jax.random.key(0))
    made.save_pretrained(tmp_path)
    assert type(made).from_pretrained(tmp_path).draft == made.draft
    assert type(made).from_pretrained(tmp_path, draft=Chain(2)).draft == Chain(2)
    assert (
        next(
            one
            for one in TRAINED
            if TRAINED[one].checkpoint_format.recognises(*described(tmp_path))
        )
        == name
    )
    with pytest.raises(
        InputError,
        match=rf"layout='papyrus': {made.title} is written in the layouts? '{made.layouts[0]}'",
    ):
        made.save_pretrained(tmp_path, layout="papyrus")


@pytest.mark.parametrize("kind", TRAINED.values())
def test_an_option_that_there_is_not_is_named_before_anything_is_read(tmp_path, kind) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^{kind.__name__}\.from_pretrained\(\) got an unexpected keyword argument 'dtpye'",
    ):
        kind.from_pretrained(tmp_path / "nothing", dtpye=jnp.float32)


LAYOUTS = [(name, layout) for name, kind in TRAINED.items() for layout in kind.layouts]
LAYOUTS.remove(("dflash", "deepspec"))  # which says that the drafter has an embedding of its own


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_ids_beyond_a_drafters_vocabulary_are_left_out(tmp_path, name, layout) -> None:
    """Nobody reads a drafter's end tokens, and published drafters have those of a target with a larger vocabulary."""
    made = TRAINED[name].init(tiny_target(), jax.random.key(0))
    made.save_pretrained(tmp_path, layout=layout)
    content = json.loads((tmp_path / "config.json").read_text())
    before = type(made).from_pretrained(tmp_path).config

    def with_foreign_ids(fields: dict) -> dict:
        changed = {
            key: with_foreign_ids(value) if isinstance(value, dict) else value
            for key, value in fields.items()
        }
        return changed | (
            {"bos_token_id": 128_000, "eos_token_id": 128_001} if "vocab_size" in fields else {}
        )

    (tmp_path / "config.json").write_text(json.dumps(with_foreign_ids(content)))
    read = type(made).from_pretrained(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, read.params, made.params)) and type(
        read.config
    ) is type(before)
    (tmp_path / "config.json").write_text(
        json.dumps(with_foreign_ids(content)).replace("128001", "[3, 128001]")
    )
    type(made).from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(with_foreign_ids(content)).replace("128001", '"</s>"')
    )
    if name != "medusa":  # its config.json says nothing of a model
        with pytest.raises(CheckpointError, match="eos_token_id='</s>': must be a token id"):
            type(made).from_pretrained(tmp_path)


def described(directory):
    stored = CheckpointFiles(directory)
    return stored.raw, stored.shapes


# --- counts ---------------------------------------------------------------------------------------


def tiny(directory, tensors: dict[str, tuple[int, ...]], content: dict) -> None:
    """A checkpoint of nearly no bytes, with a tensor of each shape."""
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in tensors.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(content))
    assert sum(file.stat().st_size for file in directory.iterdir()) < 20_000


def refused_in_little_memory(kind, directory, words: str) -> None:
    """That a checkpoint is refused for a count, and takes less than a megabyte until it is."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            kind.from_pretrained(directory)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1_000_000


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
    """The config.json of a target of two layers with a module of eight experts, and how its tensors' names begin."""
    config = tiny_config(**MIXTURES["deepseek_v3"])
    drafter = MTP.init(tiny_target(), jax.random.key(0))
    own = replace(
        drafter.config, layer=replace(config, num_layers=1), layout="deepseek", first_layer=2
    )
    declared = MTP.checkpoint_format.declare(own, "mtp")
    params = jax.tree.map(lambda param: jnp.ones(param.shape, param.dtype or "float32"), declared)
    made = drafter.replace(config=own, params=params)
    content = config_of(made, tmp_path)
    assert MTP.from_pretrained(tmp_path / "whole").config == own
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
    """Python refuses to read thousands of digits with an error of its own."""
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
    """What config.json says of it is compared with the target, and nothing is made after it."""
    drafter = MixtureOfAttentions.init(tiny_target(), jax.random.key(0))
    content = config_of(drafter, tmp_path)
    own = content["moa_config"]
    lsa = own["layer_self_attention"] | {"target_num_hidden_layers": 10_000}
    changed = {
        "target_num_hidden_layers": 10_000,
        "target_layer_inference": 9_999,
        "layer_self_attention": lsa,
    }
    (tmp_path / "whole" / "config.json").write_text(
        json.dumps(content | {"moa_config": own | changed})
    )
    tracemalloc.start()
    read = MixtureOfAttentions.from_pretrained(tmp_path / "whole")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000 and len(jax.tree.leaves(read.params)) == len(
        jax.tree.leaves(drafter.params)
    )
    with pytest.raises(InputError, match=r"\(11, 16, 10000\), but target has \(11, 16, 2\)"):
        read.check(tiny_target())


def test_a_drafter_with_layer_self_attention_says_how_it_is_loaded(tmp_path) -> None:
    made = TRAINED["eagle-lsa"].init(tiny_target(), jax.random.key(0))
    made.save_pretrained(tmp_path)
    assert "layer_self_attention.self_attn.q_proj.weight" in load_file(
        tmp_path / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match="load it with EagleWithLayerAttention, or as eagle-lsa:DIRECTORY"
    ):
        Eagle.from_pretrained(tmp_path)
