"""Compare the MTP modules of Qwen3.5 and Qwen3-Next with a slow version of vLLM's network.

transformers ignores these modules.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import MTP, DraftModel
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.sampling import Sampling
from tests.conftest import HYBRID, tiny_target
from tests.models.families import zoo

LENGTH, DEPTH = 9, 3
TEXT = np.random.default_rng(3).integers(0, zoo.VOCABULARY, LENGTH)
NAMES = (
    "qwen3_next",
    *(
        pytest.param(name, marks=pytest.mark.thorough)
        for name in ("qwen3_5 with biases", "qwen3_5_moe")
    ),
)


@dataclass
class Published:
    """A target that transformers made, and a module for it.

    transformers has made the module's decoder layer, too.
    """

    model: Any
    of_module: Any
    extra: dict[str, Any]

    @classmethod
    def make(cls, name: str) -> "Published":
        from tests.with_torch import torch

        kind, fields = zoo.MODELS[name]
        model = zoo.make(name)
        alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        if "mlp_only_layers" in fields:
            alone["mlp_only_layers"] = []
        of_module = zoo.build(kind, fields | alone, seed=5)
        torch.manual_seed(7)
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        extra = {f"mtp.{norm}.weight": torch.randn(32) * 0.3 for norm in norms} | {
            "mtp.fc.weight": torch.randn(32, 64) * 0.2
        }
        return cls(model, of_module, extra)

    def norm(self, name: str, x: Any) -> Any:
        from tests.with_torch import torch

        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return scaled * (1 + self.extra[f"mtp.{name}.weight"])

    def read(self, states: Any, tokens: Any) -> Any:
        """Return the module's states ``[1, T, H]``, which it passes on.

        A pair is a state of ``states [1, T, H]`` and the token of ``tokens [1, T]`` that follows
        it.
        """
        from tests.with_torch import torch

        embedded = self.model.model.embed_tokens(tokens)
        joined = torch.cat(
            [self.norm("pre_fc_norm_embedding", embedded), self.norm("pre_fc_norm_hidden", states)],
            dim=-1,
        )
        x = joined @ self.extra["mtp.fc.weight"].T
        inner, count = self.of_module.model, tokens.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        places = torch.arange(count)[None]
        rotary = inner.rotary_emb(x, places)
        x = inner.layers[0](x, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        return self.norm("norm", x[0] if isinstance(x, tuple) else x)

    def expected(self, length: int, drafted: list[int]) -> np.ndarray:
        """Return the probabilities ``[D, V]`` at each level of a chain of ``drafted`` tokens.

        The chain is after the first ``length`` tokens of the text.
        """
        from tests.with_torch import torch

        tokens, levels = TEXT.tolist(), []
        with torch.no_grad():
            output = self.model.model(torch.tensor([tokens[:length]]))
            states = output.last_hidden_state[:, : length - 1]
            for depth in range(len(drafted)):
                following = torch.tensor([tokens[1:length] + drafted[:depth]])
                out = self.read(states, following)
                levels.append((out[0, -1] @ self.model.lm_head.weight.T).softmax(-1).numpy())
                # The next pair has the module's own state.
                states = torch.cat([states, out[:, -1:]], dim=1)
        return np.stack(levels)

    def save(
        self, directory: Path, *, nested: str = "", one_by_one: bool = False, counted: bool = True
    ) -> None:
        """Write a checkpoint with the module's tensors among the target's, as they are published.

        Args:
            directory: the directory to write to.
            nested: the model type of a multimodal model around the target; empty for none.
            one_by_one: whether each expert has tensors of its own.
            counted: whether config.json states the number of modules.
        """
        self.of_module.save_pretrained(directory / "module")
        module_model = load_file(directory / "module" / "model.safetensors")
        module_tensors = {
            name.replace("model.", "mtp."): value
            for name, value in module_model.items()
            if ".layers." in name
        }
        module_tensors = (
            split_experts(module_tensors) if one_by_one else join_experts(module_tensors)
        )
        self.model.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        raw = json.loads((directory / "config.json").read_text())
        if counted:
            raw["mtp_num_hidden_layers"] = 1
        if nested:
            tensors = {
                name.replace("model.", "model.language_model."): value
                for name, value in tensors.items()
            }
            tensors["model.visual.merger.norm.weight"] = np.ones(3, np.float32)
            raw = {"model_type": nested, "text_config": raw, "vision_config": {}}
        tensors |= module_tensors | {name: value.numpy() for name, value in self.extra.items()}
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(raw))


def split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors of all experts as tensors of each expert."""
    result = {}
    for name, value in tensors.items():
        stem, _, joined = name.rpartition(".")
        if joined not in ("gate_up_proj", "down_proj"):
            result[name] = value
            continue
        for i, of_expert in enumerate(value):
            if joined == "down_proj":
                parts = {"down": of_expert}
            else:
                parts = dict(zip(("gate", "up"), np.split(of_expert, 2), strict=True))
            result |= {
                f"{stem}.{i}.{part}_proj.weight": np.ascontiguousarray(matrix)
                for part, matrix in parts.items()
            }
    return result


def join_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of single experts as two tensors of all experts."""
    result, experts = {}, defaultdict(dict)
    for name, value in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts[match[1]][int(match[2]), match[3]] = value
        else:
            result[name] = value
    for stem, matrices in experts.items():
        indices = sorted({index for index, _ in matrices})
        result[f"{stem}.gate_up_proj"] = np.stack(
            [np.concatenate([matrices[i, "gate"], matrices[i, "up"]]) for i in indices]
        )
        result[f"{stem}.down_proj"] = np.stack([matrices[i, "down"] for i in indices])
    return result


def drafted_by(
    directory: Path, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, specjax.Target, MTP]:
    """Return the chains that the engine drafts, their q, the target and the drafter.

    Each row has read the first tokens of the text, and a root; ``lengths`` has the number of both.
    """
    target = specjax.Target.from_pretrained(directory, dtype=np.float32)
    drafter = MTP.from_pretrained(directory, draft=Chain(DEPTH), dtype=np.float32)
    options = GenerationOptions(
        max_new_tokens=8, sampling=Sampling(temperature=1.0), eos_token_ids=()
    )
    drafter, state = decoding.start(
        target, drafter, np.tile(TEXT, (len(lengths), 1)), lengths, options
    )
    draft, _ = jax.jit(decoding.propose_step)(target, drafter, state)
    return np.asarray(draft.tokens)[:, 1:], np.asarray(draft.q)[:, :DEPTH], target, drafter


LENGTHS = np.array([2, 5, LENGTH])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_drawn_from_what_the_published_network_says(tmp_path, name) -> None:
    """Check every level after texts of several lengths, and one pass at every position."""
    published = Published.make(name)
    published.save(tmp_path, counted=name != "qwen3_next")
    tokens, q, target, drafter = drafted_by(tmp_path, LENGTHS)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
            q[row], published.expected(length, tokens[row].tolist()), atol=2e-5
        )
    output = target.forward(TEXT[None, :-1])[0]
    causal = jnp.tril(jnp.ones((1, LENGTH - 1, LENGTH - 1), bool))
    positions = jnp.arange(LENGTH - 1)[None]
    states, _ = drafter.run(
        drafter.features(output), drafter.embed(target, TEXT[None, 1:]), positions, causal, ((),)
    )
    probabilities = jax.nn.softmax(drafter.logits(target, states))[0]
    for length in range(2, LENGTH + 1):
        np.testing.assert_allclose(
            probabilities[length - 2], published.expected(length, [0])[0], atol=2e-5
        )
    assert drafter.config.layer.gated_attention and drafter.config.layer.norm_offset == 1
    assert (drafter.config.layer.moe is not None) == (name in ("qwen3_5_moe", "qwen3_next"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "nested"), [("qwen3_5", "qwen3_5"), ("qwen3_5_moe", "qwen3_5_moe")]
)
def test_modules_of_models_that_see(tmp_path, name, nested) -> None:
    published = Published.make(name)
    published.save(tmp_path, nested=nested, one_by_one=True)
    tokens, q, target, _ = drafted_by(tmp_path, LENGTHS[1:2])
    np.testing.assert_allclose(q[0], published.expected(LENGTHS[1], tokens[0].tolist()), atol=2e-5)
    assert isinstance(load_drafter(str(tmp_path), Chain(2), target.config), MTP)
    raw = json.loads((tmp_path / "config.json").read_text())
    # The tensors of a checkpoint on the hub are not known yet.
    assert MTP.checkpoint_format.recognises(raw, ())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_modules_alone_are_read_as_they_were_written(tmp_path, name, one_by_one) -> None:
    Published.make(name).save(tmp_path, one_by_one=one_by_one)
    read = MTP.from_pretrained(tmp_path, dtype=np.float32)
    read.save_pretrained(tmp_path / "alone")
    again = MTP.from_pretrained(tmp_path / "alone", dtype=np.float32)
    assert again.config == read.config
    jax.tree.map(np.testing.assert_array_equal, again.params, read.params)
    before, after = (
        load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "alone")
    )
    assert set(after) == {tensor for tensor in before if tensor.startswith("mtp.")}
    expected = {tensor: before[tensor] for tensor in after}
    jax.tree.map(np.testing.assert_array_equal, expected, after)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_new_modules_have_the_names_of_the_published_ones(tmp_path, name) -> None:
    """Check that a trained module can be put beside its hybrid target, and is found there."""
    Published.make(name).save(tmp_path, one_by_one=True)
    config = config_json.read_config(CheckpointFiles(tmp_path))
    target = specjax.Target.init(config, jax.random.key(0))
    drafter = MTP.init(target, jax.random.key(1))
    assert drafter.config == MTP.from_pretrained(tmp_path).config
    drafter.save_pretrained(tmp_path / "alone")
    before, after = (
        load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "alone")
    )
    assert {tensor: value.shape for tensor, value in after.items()} == {
        tensor: value.shape for tensor, value in before.items() if tensor.startswith("mtp.")
    }
    again = MTP.from_pretrained(tmp_path / "alone", dtype=np.float32)
    assert again.config == drafter.config
    assert isinstance(load_drafter(f"{tmp_path / 'alone'}", Chain(2), config), MTP)


def test_more_modules_than_there_are_names_for_are_plain() -> None:
    target = tiny_target(**HYBRID)
    drafter = MTP.init(target, jax.random.key(1), modules=2)
    assert drafter.config.layout == "mimo" and not drafter.config.layer.gated_attention


def test_what_is_wrong_is_refused_by_name(tmp_path) -> None:
    published = Published.make("qwen3_5")
    published.save(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"mtp_num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="modules=2: Qwen's checkpoints have names for one"):
        MTP.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(
        tensors | {"mtp.layers.1.input_layernorm.weight": np.zeros(32, np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match="mtp_num_hidden_layers=1, but there are tensors of 2 modules"
    ):
        MTP.from_pretrained(tmp_path)
    save_file(
        tensors | {"mtp.embed_tokens.weight": np.zeros((37, 32), np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=r"mtp\.embed_tokens\.weight. is no part of the MTP modules"
    ):
        MTP.from_pretrained(tmp_path)
    save_file(
        {name: value for name, value in tensors.items() if "mtp" not in name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        MTP.from_pretrained(tmp_path)
    config = config_json.read_config(CheckpointFiles(tmp_path))
    assert isinstance(load_drafter(str(tmp_path), Chain(2), config), DraftModel)
    llama = {"model_type": "llama", **{key: raw[key] for key in zoo.SIZES if key in raw}}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model_type='llama': only Qwen3\.5 and Qwen3-Next have modules"
    ):
        MTP.from_pretrained(tmp_path)
