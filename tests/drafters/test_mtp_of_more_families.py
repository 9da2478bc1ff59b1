"""Compare the MTP modules of Nemotron 3 and MiMo-V2 with a slow version of published networks.

transformers ignores these modules. Their layers are layers of the families, so the oracle is a
model whose last layers are those of the modules. The layers' order is that of vLLM's
nemotron_h_mtp.py and mimo_v2_mtp.py. What the modules read is what SGLang gives them
(multi_layer_eagle_worker_v2.py): all modules of MiMo-V2 read the target's states, the second with
the token after the next, and so on. sglang-jax measured that they were trained so
(github.com/sgl-project/sglang-jax/pull/1256).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.drafters import MTP
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain, StaticTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.fields import CheckpointError
from tests.drafters.test_mtp import check_on_a_mesh
from tests.drafters.test_mtp_of_hybrids import LENGTHS, TEXT, drafted_by
from tests.models.families import zoo

FULL, WINDOWED, WINDOW = "full_attention", "sliding_attention", 5


@dataclass
class Case:
    """A kind of checkpoint.

    Attributes:
        name: the model in the zoo.
        changes: fields of its configuration, whose last layers are those of the modules.
        layers: the number of layers of the target.
        modules: the layers of each module.
        prefix: the prefix of the names of the modules' tensors, before the index of a layer.
        norm: the name of the target's last norm.
        without: the fields of config.json that the published file lacks, and replacements.
    """

    name: str
    changes: dict[str, Any]
    layers: int
    modules: list[list[int]]
    prefix: str
    norm: str
    replaced: dict[str, Any]


CASES = {
    "nemotron": Case(
        "nemotron_h with experts",
        {"layers_block_type": [FULL, "linear_attention", "moe", FULL, "moe"]},
        3,
        [[3, 4]],
        "mtp.layers.",
        "norm_f",
        {
            "layers_block_type": None,
            "layer_types": None,
            "hybrid_override_pattern": "*ME",
            "mtp_layers_block_type": None,
            "mtp_hybrid_override_pattern": "*E",
            "num_nextn_predict_layers": 1,
        },
    ),
    "mimo_v2": Case(
        "mimo_v2_flash",
        {
            "num_hidden_layers": 5,
            "layer_types": [FULL, WINDOWED, WINDOWED, WINDOWED, WINDOWED],
            "mlp_layer_types": ["dense", "sparse", "dense", "dense", "dense"],
        },
        2,
        [[2], [3], [4]],
        "model.mtp.layers.",
        "norm",
        {
            "layer_types": [FULL, WINDOWED],
            "mlp_layer_types": ["dense", "sparse"],
            "num_hidden_layers": 2,
        },
    ),
}


@dataclass
class Published:
    """A model of transformers, and the tensors that its modules have beside their layers."""

    case: Case
    model: Any
    extra: list[dict[str, Any]]

    @classmethod
    def make(cls, name: str) -> "Published":
        from tests.with_torch import torch

        case = CASES[name]
        kind, fields = zoo.MODELS[case.name]
        model = zoo.build(kind, fields | case.changes)
        torch.manual_seed(7)
        norms = ("enorm", "hnorm", "final_layernorm")
        extra = [
            {norm: 1 + torch.randn(32) * 0.3 for norm in norms}
            | {"eh_proj": torch.randn(32, 64) * 0.2}
            for _ in case.modules
        ]
        return cls(case, model, extra)

    def norm(self, weight: Any, x: Any) -> Any:
        from tests.with_torch import torch

        config = self.model.config
        epsilon = getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight

    def read(self, module: int, states: Any, tokens: Any) -> Any:
        """Return the states ``[1, T, H]`` of a module, after its norm."""
        from tests.with_torch import torch

        inner, extra, count = self.model.model, self.extra[module], tokens.shape[1]
        embedded = self.model.get_input_embeddings()(tokens)
        parts = [self.norm(extra["enorm"], embedded), self.norm(extra["hnorm"], states)]
        x = torch.cat(parts, dim=-1) @ extra["eh_proj"].T
        places = torch.arange(count)[None]
        visible = torch.ones(count, count).tril().bool()
        if self.case.name == "mimo_v2_flash":
            visible &= places.T - places < WINDOW
        mask = torch.zeros(count, count).masked_fill(~visible, float("-inf"))[None, None]
        for layer in self.case.modules[module]:
            rotary = {}
            if self.case.name == "mimo_v2_flash":
                rotary = {"position_embeddings": inner.rotary_emb(x, places, WINDOWED)}
            x = inner.layers[layer](x, attention_mask=mask, position_ids=places, **rotary)
        return self.norm(extra["final_layernorm"], x)

    def expected(self, length: int, drafted: list[int]) -> np.ndarray:
        """Return the probabilities ``[D, V]`` at each level of a chain of ``drafted`` tokens."""
        from tests.with_torch import torch

        inner, case = self.model.model, self.case
        tokens, levels = TEXT.tolist()[:length], []
        with torch.no_grad():
            output = self.model(torch.tensor([tokens]), output_hidden_states=True)
            last = output.hidden_states[case.layers][:, : length - 1]
            states = getattr(inner, case.norm)(last)
            tokens, final = tokens + drafted, len(case.modules) - 1
            for depth in range(len(drafted)):
                module = min(depth, final)
                following = tokens[1 + module : 1 + module + states.shape[1]]
                out = self.read(module, states, torch.tensor([following]))
                levels.append((out[0, -1] @ self.model.lm_head.weight.T).softmax(-1).numpy())
                if module == final:  # beyond the modules the last one reads its own states
                    states = torch.cat([states, out[:, -1:]], dim=1)
        return np.stack(levels)

    def save(self, directory: Path) -> None:
        """Write a checkpoint with the modules' tensors among the target's, as it is published."""
        case = self.case
        self.model.save_pretrained(directory)
        tensors = {}
        for stored, value in load_file(directory / "model.safetensors").items():
            _, _, after = stored.partition(".layers.")
            index, _, rest = after.partition(".")
            rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm")
            is_of_module = after and int(index) >= case.layers
            name = f"{case.prefix}{int(index) - case.layers}.{rest}" if is_of_module else stored
            tensors[name] = value
        for module, extra in enumerate(self.extra):
            first, last = (case.modules[module][place] - case.layers for place in (0, -1))
            for name, value in extra.items():
                block = last if name == "final_layernorm" else first
                tensors[f"{case.prefix}{block}.{name}.weight"] = value.numpy()
        save_file(tensors, directory / "model.safetensors")
        raw = json.loads((directory / "config.json").read_text()) | case.replaced
        raw = {name: value for name, value in raw.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(raw))


@pytest.fixture(scope="module", params=CASES)
def published(request, tmp_path_factory):
    """Return a published model and the directory of its checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    model = Published.make(request.param)
    model.save(directory)
    return model, directory


@pytest.mark.full
def test_drafts_are_drawn_from_what_the_published_network_says(published) -> None:
    """Check every level, beyond the modules as well, after texts longer than a window and not."""
    model, directory = published
    tokens, q, _, drafter = drafted_by(directory, LENGTHS)
    assert drafter.modules == len(model.case.modules)
    for row, length in enumerate(LENGTHS):
        expected = model.expected(length, tokens[row].tolist())
        np.testing.assert_allclose(q[row], expected, atol=2e-5)


def with_a_tree(directory: Path) -> tuple[specjax.Target, MTP]:
    draft = StaticTree(((0,), (1,), (0, 0), (0, 0, 0)))
    return (
        specjax.Target.from_pretrained(directory, dtype=np.float32),
        MTP.from_pretrained(directory, draft=draft, dtype=np.float32),
    )


@pytest.mark.full
def test_texts_do_not_depend_on_the_modules(published) -> None:
    conformance.check_coupled(*with_a_tree(published[1]), new_tokens=10)


@pytest.mark.thorough
def test_the_modules_pass_conformance(published) -> None:
    conformance.check(*with_a_tree(published[1]), new_tokens=10, come_and_go=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("published", "sizes"),
    [("mimo_v2", (1, 2)), ("mimo_v2", (2, 1))],
    indirect=["published"],
)
def test_modules_with_a_window_in_pages_on_a_mesh(published, sizes) -> None:
    """Texts and drafts end beyond the window."""
    check_on_a_mesh(published[1], sizes, StaticTree(((0,), (1,), (0, 0), (0, 0, 0))))


@pytest.mark.full
def test_modules_alone_are_read_as_they_were_written(published, tmp_path) -> None:
    _, directory = published
    read = MTP.from_pretrained(directory, dtype=np.float32)
    read.save_pretrained(tmp_path)
    again = MTP.from_pretrained(tmp_path, dtype=np.float32)
    assert again.config == read.config
    jax.tree.map(np.testing.assert_array_equal, again.params, read.params)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert set(after) == {name for name in before if "mtp." in name}
    assert isinstance(load_drafter(str(tmp_path), Chain(2), read.config.layer), MTP)


@pytest.mark.full
def test_what_is_wrong_is_refused_by_name(published, tmp_path) -> None:
    model, directory = published
    raw = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")

    def read(fields=None, without: str = "-"):
        (tmp_path / "config.json").write_text(json.dumps(raw | (fields or {})))
        remaining = {name: value for name, value in tensors.items() if without not in name}
        save_file(remaining, tmp_path / "model.safetensors")
        return MTP.from_pretrained(tmp_path, dtype=np.float32)

    if model.case.name == "mimo_v2_flash":
        with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers=2, but .* 3 modules"):
            read({"num_nextn_predict_layers": 2})
        with pytest.raises(
            CheckpointError, match=r"mtp.layers.0.eh_proj.weight': MTP modules were"
        ):
            read(without="mtp.layers.0.eh_proj")
        # MiniMax-M2's fields mean nothing here.
        drafter = read({"use_mtp": True, "num_mtp_modules": 3})
        target = specjax.Target.from_pretrained(directory, dtype=np.float32)
        with pytest.raises(InputError, match="it is 6 deep, but layers of this drafter see only"):
            drafter.replace(draft=Chain(WINDOW + 1)).check(target)
        return
    with pytest.raises(CheckpointError, match="mtp_hybrid_override_pattern='ME': only blocks"):
        read({"mtp_hybrid_override_pattern": "ME"})
    with pytest.raises(CheckpointError, match=r"mtp_layers_block_type=\['moe'\]: only blocks"):
        read({"mtp_layers_block_type": ["moe"]})
    with pytest.raises(
        CheckpointError, match=r"blocks of mtp_hybrid_override_pattern=3, but .* 2 blocks"
    ):
        read({"mtp_hybrid_override_pattern": "*EE"})
    with pytest.raises(CheckpointError, match="modules=2: Nemotron's checkpoints have names for"):
        read({"num_nextn_predict_layers": 2})
    with pytest.raises(CheckpointError, match=r"the number of experts=8, but .* 7 experts"):
        read(without="mtp.layers.1.mixer.experts.7.")
    with pytest.raises(CheckpointError, match=r"mtp.layers.0.eh_proj.weight': MTP modules were"):
        read(without="eh_proj")
    same = read(
        {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["attention", "moe"]}
    )
    assert same.config == MTP.from_pretrained(directory).config


def test_modules_that_were_never_published_are_refused_in_a_line(tmp_path) -> None:
    zoo.save("minimax_m2", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    published = raw | {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(
        CheckpointError,
        match=r"^[^\n]*use_mtp=True, num_mtp_modules=3: MiniMax-M2's modules are not publ[^\n]*$",
    ):
        MTP.from_pretrained(tmp_path)
    specjax.Target.from_pretrained(tmp_path)
