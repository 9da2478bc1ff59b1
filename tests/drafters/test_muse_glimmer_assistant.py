"""Compare drafts of Muse Glimmer's assistant, a DFlash with windows, with transformers' network."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DFlash
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.sampling import Sampling
from tests.models.families import zoo

LENGTH, WINDOW, BLOCK = 14, 5, 4
TEXT = np.random.default_rng(3).integers(0, zoo.VOCABULARY - 1, LENGTH)
MASK = zoo.VOCABULARY - 1
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_assistant() -> Any:
    """Return an assistant with random weights, of transformers."""
    import transformers

    from tests.with_torch import torch

    config = transformers.MuseGlimmerAssistantConfig(**SIZES)
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    assistant = transformers.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, value in assistant.named_parameters():
            value.add_(torch.randn_like(value) * (0.3 if "norm" in name else 0.2))
    return assistant


def save(assistant: Any, directory: Path) -> None:
    """Write the assistant's checkpoint. The published vocabulary would be too large."""
    assistant.save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"vocab_size": zoo.VOCABULARY}))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a target and an assistant of transformers, and the directories of their files."""
    directory = tmp_path_factory.mktemp("muse")
    target, assistant = zoo.save("muse_glimmer", directory / "target"), make_assistant()
    save(assistant, directory / "assistant")
    return target, assistant, directory / "target", directory / "assistant"


def expected(target: Any, assistant: Any, length: int) -> np.ndarray:
    """Return the probabilities ``[D, V]`` of the block after the first ``length`` tokens."""
    from transformers.cache_utils import DFlashCache

    from tests.with_torch import torch

    tokens = torch.tensor(TEXT[None, :length])
    embedding = target.get_input_embeddings()
    with torch.no_grad():
        states = target(tokens[:, :-1], output_hidden_states=True).hidden_states
        context = torch.cat([states[i + 1] for i in SIZES["target_layer_ids"]], dim=-1)
        block = torch.tensor([[int(TEXT[length - 1])] + [MASK] * (BLOCK - 1)])
        # Without the norm that the target has after its embedding.
        noise = torch.nn.functional.embedding(block, embedding.weight)
        cache = DFlashCache(config=assistant.config)
        cache.set_previous_accepted_tokens(length - 1)
        places = torch.arange(length - 1 + BLOCK)[None]
        output = assistant(
            noise_embeds=noise, context_hidden_states=context, position_ids=places, cache=cache
        )
        text = target.config.text_config
        logits = target.lm_head(output.last_hidden_state[0, 1:]) * text.output_multiplier
        logits = text.final_logit_softcapping * torch.tanh(logits / text.final_logit_softcapping)
        return logits.softmax(-1).numpy()


@pytest.mark.full
def test_drafts_are_drawn_from_what_transformers_network_says(published) -> None:
    """Check texts that are shorter and longer than a window, and the likeliest tokens."""
    model, assistant, target_path, path = published
    target = specjax.Target.from_pretrained(target_path, dtype=np.float32)
    drafter = DFlash.from_pretrained(path, dtype=np.float32)
    assert drafter.draft_shape == Chain(BLOCK - 1)
    lengths = np.array([2, 6, LENGTH])
    options = GenerationOptions(
        max_new_tokens=8, sampling=Sampling(temperature=1.0), eos_token_ids=()
    )
    drafter, state = decoding.start(target, drafter, np.tile(TEXT, (3, 1)), lengths, options)
    draft, _ = jax.jit(decoding.propose_step)(target, drafter, state)
    q = np.asarray(draft.q)[:, : BLOCK - 1]
    for row, length in enumerate(lengths):
        reference = expected(model, assistant, length)
        np.testing.assert_allclose(q[row], reference, atol=2e-5)
        np.testing.assert_array_equal(q[row].argmax(-1), reference.argmax(-1))


@pytest.mark.full
@pytest.mark.thorough_except("draft1-False")
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("draft", [None, DynamicTree(top_k=3, depth=3, nodes=7)])
def test_texts_do_not_depend_on_the_assistant(published, draft, is_whole) -> None:
    """Check texts alone, or everything that conformance asks of a drafter."""
    _, _, target_path, path = published
    target = specjax.Target.from_pretrained(target_path, dtype=np.float32)
    drafter = DFlash.from_pretrained(path, dtype=np.float32, draft=draft)
    if is_whole:
        conformance.check(target, drafter, new_tokens=10, come_and_go=False)
    else:
        conformance.check_coupled(target, drafter, new_tokens=10)


@pytest.mark.full
def test_an_assistant_is_read_as_it_was_written(published, tmp_path) -> None:
    """Check that it is written in z-lab's layout, and refused in one that cannot express it."""
    _, _, target_path, path = published
    drafter = DFlash.from_pretrained(path, dtype=np.float32)
    assert drafter.config.taps == (1, 3, 4) and not drafter.config.embedding_normed
    assert drafter.config.layer.sliding_window == WINDOW + 1
    drafter.save_pretrained(tmp_path)
    again = DFlash.from_pretrained(tmp_path, dtype=np.float32)
    assert again.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    for layout in ("speculators", "deepspec"):
        with pytest.raises(InputError, match="embeddings without the target's norm"):
            drafter.save_pretrained(tmp_path / layout, layout=layout)
    config = specjax.Target.from_pretrained(target_path).config
    assert isinstance(load_drafter(str(path), None, config), DFlash)


@pytest.mark.full
def test_what_is_wrong_is_refused_by_name(published, tmp_path) -> None:
    path = published[3]
    raw = json.loads((path / "config.json").read_text())
    save_file(load_file(path / "model.safetensors"), tmp_path / "model.safetensors")
    for changes, message in (
        ({"block_size": WINDOW + 2}, "sliding_window=5: must be at least block_size - 1 = 6"),
        ({"target_layer_ids": [0, 2]}, "fc.weight reads 96 numbers, but 2 layers"),
        ({"num_hidden_layers": 3, "layer_types": None}, "num_hidden_layers=3, but there are"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(CheckpointError, match=message):
            DFlash.from_pretrained(tmp_path)
    # The last token of a block sees the root, as many places before it as the window is a distance.
    (tmp_path / "config.json").write_text(json.dumps(raw | {"block_size": WINDOW + 1}))
    assert DFlash.from_pretrained(tmp_path).draft_shape == Chain(WINDOW)


@pytest.mark.full
def test_a_published_assistant_leaves_its_vocabulary_out(tmp_path) -> None:
    """Check config.json as transformers writes it, with the headers of tensors alone."""
    import transformers

    raw = transformers.MuseGlimmerAssistantConfig().to_dict()
    raw.pop("vocab_size", None)
    taps, hidden = raw["target_layer_ids"], raw["hidden_size"]
    shapes = {"encoder.fc.weight": (hidden, len(taps) * hidden)}
    shapes |= {
        f"layers.{layer}.self_attn.q_proj.weight": (raw["num_attention_heads"] * 128, hidden)
        for layer in range(raw["num_hidden_layers"])
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stored = CheckpointFiles(tmp_path)
    vars(stored)["shapes"] = shapes  # in place of those of a file of many gigabytes
    config = DFlash.checkpoint_format.read_config(stored)
    assert config.layer.vocab_size == 202_048
    assert config.taps == tuple(layer + 1 for layer in taps)
    assert config.layer.sliding_window == raw["sliding_window"] + 1
    assert config.block_size == raw["block_size"] and not config.embedding_normed
