"""Test Gemma 4's assistant.

It is compared with transformers round by round, drafts losslessly with every shape, and is saved
in Google's layout.
"""

import dataclasses
import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.methods import gemma4_assistant
from specjax.drafters.registry import load_drafter
from specjax.errors import InputError
from specjax.models.transformer import Target
from tests.conftest import BESIDE_ATTENTION, LAYERED, blocks, tiny_config, tiny_target
from tests.models.families import zoo

HEADS = {
    "all tokens": {},
    "centroids": {
        "use_ordered_embeddings": True,
        "num_centroids": 9,
        "centroid_intermediate_top_k": 2,
    },
}
VOCABULARY = 36  # 9 clusters of 4


@cache
def pair(head: str, directory: str):
    """Return a Gemma 4 whose last layers share entries, and an assistant.

    The result is transformers' target and assistant, and ours.
    """
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    from tests.with_torch import torch

    kind, fields = zoo.MODELS["gemma4 E2B"]
    fields = fields | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    assert kind == "Gemma4Text"
    theirs = zoo.build(kind, fields)
    theirs.save_pretrained(f"{directory}/target")
    without = {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
    }
    kinds = {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "final_logit_softcapping": None,
    }

    # transformers 5.23 raises an error if all layers read the entries of other layers, as the
    # assistant's layers do.
    sharing = Gemma4TextConfig.kv_sharing_modes

    def modes(config):
        is_assistant = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if is_assistant else sharing.fget(config)

    Gemma4TextConfig.kv_sharing_modes = property(modes)
    text_config = Gemma4TextConfig(**fields | without | sizes | kinds)
    config = Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=32, **HEADS[head])
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    torch.manual_seed(1)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    zoo.disturb(assistant)
    with torch.no_grad():
        if head == "centroids":
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    assistant.save_pretrained(f"{directory}/assistant")
    target = Target.from_pretrained(f"{directory}/target", dtype=np.float32)
    drafter = load_drafter(f"{directory}/assistant", None, target.config, np.float32)
    return theirs, assistant, target, drafter


@pytest.fixture(params=HEADS)
def both(request, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / f"assistant {request.param}"
    return pair(request.param, str(directory)), directory


@pytest.mark.full
@pytest.mark.thorough_except("all tokens-1", "all tokens-5", "centroids-4")
@pytest.mark.parametrize("read", [1, 4, 5, 6, 20])
def test_a_rounds_states_and_logits_are_those_of_transformers(both, read) -> None:
    """Check three levels of a chain, after texts shorter and longer than the window of 5."""
    from tests.with_torch import torch

    (theirs, assistant, target, drafter), _ = both
    tokens = np.random.default_rng(read).integers(0, VOCABULARY, (1, read + 4))
    with torch.no_grad():
        prefill = theirs(
            torch.tensor(tokens[:, :read]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        above = prefill.hidden_states[-1][:, -1:]
    output, cache = target.forward(jnp.asarray(tokens[:, :read]), target.new_cache(1, 32))
    hidden = output.hidden[:, -1:]
    np.testing.assert_allclose(hidden, above.numpy(), atol=1e-4)
    of_reads = cache.of_layers(drafter.reads(target.config))
    for level in range(3):
        token = tokens[:, read + level]
        with torch.no_grad():
            embedded = theirs.get_input_embeddings()(torch.tensor(token[:, None]))
            expected = assistant(
                inputs_embeds=torch.cat([embedded, above], dim=-1),
                position_ids=torch.tensor([[read]]),
                shared_kv_states=prefill.shared_kv_states,
            )
        above = expected.last_hidden_state
        logits, hidden = drafter.read(target, jnp.asarray(token[:, None]), hidden, of_reads)
        assert np.abs(expected.logits.numpy()).max() > 0.1
        np.testing.assert_allclose(hidden, above.numpy(), atol=1e-4)
        np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-4)


def test_google_s_layout_is_read_and_written_bit_for_bit(both, tmp_path) -> None:
    from safetensors.numpy import load_file

    (*_, drafter), directory = both
    drafter.save_pretrained(tmp_path)
    theirs, ours = (
        load_file(place / "model.safetensors") for place in (directory / "assistant", tmp_path)
    )
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert value.dtype == ours[name].dtype, name
        np.testing.assert_array_equal(value, ours[name])
    again = specjax.Gemma4Assistant.from_pretrained(tmp_path, dtype=np.float32)
    assert again.config == drafter.config
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"text_config": raw["text_config"] | {"num_hidden_layers": 3}})
    )
    with pytest.raises(InputError, match=r"layer_types names 4 layers|num_hidden_layers"):
        specjax.Gemma4Assistant.from_pretrained(tmp_path)


DYNAMIC = specjax.DynamicTree(top_k=3, depth=3, nodes=8)


@pytest.mark.full
@pytest.mark.thorough_except("centroids")
def test_texts_do_not_depend_on_it(both) -> None:
    (_, _, target, drafter), _ = both
    specjax.conformance.check_coupled(target, dataclasses.replace(drafter, draft=DYNAMIC))


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [DYNAMIC, 3, specjax.SampledTree((2, 2))], ids=str)
def test_it_is_lossless_on_a_gemma(both, shape) -> None:
    (_, _, target, drafter), _ = both
    specjax.conformance.check(target, dataclasses.replace(drafter, draft=shape))


WINDOWED = pytest.param({"sliding_window": 3, "windowed_layers": (0,)}, id="windows")


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [pytest.param({}, id="full"), WINDOWED])
def test_it_drafts_for_an_ordinary_target(changes) -> None:
    target = tiny_target(**changes)
    drafter = specjax.Gemma4Assistant.init(
        target, jax.random.key(1), draft=specjax.DynamicTree(top_k=2, depth=3, nodes=6)
    )
    specjax.conformance.check(target, drafter, come_and_go=bool(changes))


@pytest.mark.parametrize(
    ("changes", "sources"),
    [
        (blocks("*-"), (None, 0)),
        (blocks("*M-"), (None, 0)),
        (BESIDE_ATTENTION, (None, 1)),
        (LAYERED["sharing"], (0, 1)),
    ],
)
def test_it_reads_layers_with_entries_alone(changes, sources) -> None:
    assert gemma4_assistant._sources(tiny_config(**changes)) == sources


def test_it_refuses_another_target(both) -> None:
    (_, _, _, drafter), _ = both
    with pytest.raises(InputError, match="was made for a target of hidden size 32 with 36 tokens"):
        drafter.check(tiny_target())
