"""Test a drafter that the library does not know.

A class and one line of the registry are enough for the library to support it.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import Mesh
from safetensors.numpy import load_file

from specjax.chips import Chip
from specjax.cli.main import main
from specjax.cli.plan import compile as plan_compile
from specjax.drafters import registry
from specjax.drafters.base import Committed, check_mesh
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.registry import DraftingMethod, load_drafter
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree
from specjax.evaluation import conformance
from specjax.lowering import abstract
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, check_fields, whole
from specjax.models.params import Param, Params, matrix, norm
from specjax.models.primitives import linear, rms_norm
from specjax.models.transformer import Target
from specjax.sampling import RowSampling
from specjax.sharding import make_mesh
from tests.conftest import tiny_config, tiny_target

# --- its own file ---


@dataclass(frozen=True)
class WizardConfig:
    hidden_size: int
    vocab_size: int
    rungs: int = 1


def layout_of(stored: CheckpointFiles) -> str:
    return "robe" if any(name.startswith("robe.") for name in stored.shapes) else "hat"


def read_config(stored: CheckpointFiles) -> WizardConfig:
    checks = {name: whole(1, 10_000) for name in ("wizard_rungs", "hidden_size", "vocab_size")}
    rungs, hidden, vocab = check_fields(stored.raw, checks, stored.file).values()
    stored.check_count("wizard_rungs", rungs, stored.numbered(f"{layout_of(stored)}."), "rungs")
    return WizardConfig(hidden, vocab, rungs)


def declare(config: WizardConfig, layout: str) -> Params:
    hidden = config.hidden_size

    def rung(name: str) -> Params:
        return {
            "norm": norm(f"{name}.norm", 2 * hidden),
            "step": matrix(f"{name}.step", (2 * hidden, None), (hidden, None)),
            "step_bias": Param((hidden,), (None,), f"{name}.step.bias", "zeros"),
        }

    return {
        "rungs": [rung(f"{layout}.{index}") for index in range(config.rungs)],
        "lm_head": matrix("lm_head", (hidden, None), (config.vocab_size, "vocab")),
    }


def format_config(drafter: "Wizard", layout: str, dtype: str, target: str) -> dict[str, Any]:
    return {
        "wizard_rungs": drafter.config.rungs,
        **{name: getattr(drafter.config, name) for name in ("hidden_size", "vocab_size")},
    }


@struct.dataclass
class Wizard(TrainedDrafter):
    """A recurrent head.

    It starts from the target's last hidden state, and continues with the tokens that it drafts.
    """

    params: Params
    config: WizardConfig = struct.field(pytree_node=False)
    draft: DraftShape = struct.field(pytree_node=False, default=Chain(3))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    grows_trees: ClassVar[bool] = True
    checkpoint_format: ClassVar[CheckpointFormat] = CheckpointFormat(
        title="a wizard",
        layouts=("hat", "robe"),
        recognises=lambda raw, tensors: "wizard_rungs" in raw,
        read_config=read_config,
        declare=declare,
        axis_units=lambda config: {"vocab": config.vocab_size},
        format_config=format_config,
        layout_of=layout_of,
        describe=lambda drafter, layout: f"rungs are called {layout}",
    )

    @classmethod
    def init(
        cls, target: Target, key: jax.Array, draft: DraftShape = Chain(3), *, rungs: int = 1
    ) -> "Wizard":
        config = WizardConfig(target.config.hidden_size, target.config.vocab_size, rungs)
        return cls(
            params=cls._initialise(config, key, target),
            config=config,
            draft=draft,
            mesh=target.mesh,
        )

    def check(self, target: Target) -> None:
        check_mesh(self.mesh, target)

    def start(self, target: Target, batch: int, capacity: int) -> jax.Array:
        return jnp.zeros((batch, self.config.hidden_size), self._dtype)

    def append_committed(self, target: Target, state: jax.Array, committed: Committed) -> jax.Array:
        return committed.newest(committed.output.hidden, state)

    def propose(
        self,
        target: Target,
        state: jax.Array,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, jax.Array]:
        def climb(states: jax.Array, tokens: jax.Array) -> jax.Array:
            embedded = target.embed(tokens)
            for rung in self.params["rungs"]:
                joined = rms_norm(jnp.concatenate([states, embedded], axis=-1), rung["norm"], 1e-6)
                states = states + jax.nn.silu(linear(rung, "step", joined))
            return states

        def logits(states: jax.Array) -> jax.Array:
            return (states @ self.params["lm_head"]).astype(jnp.float32)

        def read(frontier: Frontier, above: jax.Array) -> tuple[jax.Array, jax.Array]:
            states = climb(
                jnp.take_along_axis(above, frontier.parents[..., None], axis=1), frontier.tokens
            )
            return logits(states), states

        first = climb(state[:, None], root[:, None])
        above = jnp.broadcast_to(first, (root.shape[0], self.draft_shape.width, first.shape[-1]))
        draft, _, _ = expand(
            self.draft_shape, read, logits(first)[:, 0], above, root, sampling, keys, active
        )
        return draft, state


# --- its line in the registry ---


@pytest.fixture(autouse=True)
def _registered(monkeypatch) -> None:
    monkeypatch.setattr(
        registry, "METHODS", {"wizard": DraftingMethod.of("wizard", Wizard)} | registry.METHODS
    )


# --- the tests ---


@pytest.fixture
def wizard() -> Wizard:
    return Wizard.init(tiny_target(), jax.random.key(3), rungs=2)


def assert_same(actual: TrainedDrafter, expected: TrainedDrafter) -> None:
    assert type(actual) is type(expected) and actual.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(3, 3, 9)])
def test_it_keeps_the_contract(target, wizard, shape) -> None:
    conformance.check(target, wizard.replace(draft=shape))


@pytest.mark.parametrize("layout", Wizard.layouts)
def test_it_is_saved_and_found_by_name_and_by_what_it_is(wizard, tmp_path, layout) -> None:
    config = tiny_config()
    wizard.save_pretrained(tmp_path, layout=layout)
    assert f"{layout}.1.step.weight" in load_file(tmp_path / "model.safetensors")
    assert_same(Wizard.from_pretrained(tmp_path, dtype=jnp.float32), wizard)
    for name in (str(tmp_path), f"wizard:{tmp_path}"):
        drafter = load_drafter(name, DynamicTree(2, 2, 4), config, dtype=jnp.float32)
        assert_same(drafter, wizard)
        assert drafter.draft == DynamicTree(2, 2, 4)
    assert load_drafter(str(tmp_path), None, config).draft == Chain(3)


def test_it_is_converted(wizard, tmp_path, capsys) -> None:
    wizard.save_pretrained(tmp_path / "hat", dtype=jnp.bfloat16)
    arguments = ("convert", "--drafter", str(tmp_path / "hat"), "--output", str(tmp_path / "robe"))
    assert main([*arguments, "--to", "robe"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "layout robe, bfloat16; rungs are called robe" in printed
    arguments = ("convert", "--drafter", f"wizard:{tmp_path / 'robe'}")
    arguments += ("--output", str(tmp_path / "again"))
    assert main([*arguments, "--to", "hat"]) == 0
    for file in (tmp_path / "hat").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    capsys.readouterr()
    assert main([*arguments, "--to", "scarf"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "to='scarf': a wizard is written as hat, robe: give one of these" in printed


def test_what_is_wrong_with_a_checkpoint_is_said_in_its_words(wizard, tmp_path) -> None:
    wizard.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"wizard_rungs": 9_999}))
    with pytest.raises(
        CheckpointError, match="wizard_rungs=9999, but there are tensors of 2 rungs"
    ):
        Wizard.from_pretrained(tmp_path)
    file.write_text(json.dumps(content | {"vocab_size": 12}))
    with pytest.raises(
        CheckpointError,
        match=r"'lm_head\.weight' has shape \(11, 16\), but in a wizard with this config",
    ):
        Wizard.from_pretrained(tmp_path)


@pytest.mark.thorough
def test_it_is_planned_for_chips_that_are_not_there(tmp_path, capsys, monkeypatch) -> None:
    """Test ``specjax plan compile`` with four CPU devices in place of a TPU's.

    The bytes that a step reads are checked, too.
    """
    chip = Chip("toy", flops=1e12, bandwidth=1e11, memory=1e9, source="made up", links=1e10)
    monkeypatch.setattr(
        plan_compile,
        "find_mesh",
        lambda topology, data, model, slices: (make_mesh(data, model), chip),
    )
    shape = tiny_config(vocab_size=64, hidden_size=32, intermediate_size=64)
    (tmp_path / "config.json").write_text(json.dumps(config_json.format_config(shape, "float32")))
    arguments = ["plan", "compile", "--chips", "v5e:2x2", "--mesh", "2", "2", "--json"]
    arguments += ["--target", str(tmp_path), "--drafter", "wizard", "--draft", "chain:2"]
    arguments += ["--batch", "4", "--context", "24"]
    assert main(arguments) == 0
    plain, drafted = json.loads(capsys.readouterr().out)["steps"]
    assert (plain["drafter"], drafted["drafter"]) == ("plain", "wizard")
    # Each of the two levels reads the drafter's weights and state, and by default the target's
    # head, all in bfloat16. A device has half of what is split over the vocabulary, and the states
    # of half of the rows.
    weights, head, state = 64 + 64 * 32 + 32 + 32 * 64 // 2, 32 * 64 // 2, 2 * 32
    expected = 2 * 2 * (weights + head + state)
    assert drafted["must_read_bytes"] - plain["must_read_bytes"] == expected
    target = abstract.abstract_model(shape, make_mesh(2, 2))
    placed = abstract.abstract_drafter("wizard", None, target)
    real = Wizard.init(
        Target.init(shape, jax.random.key(0), jnp.bfloat16, make_mesh(2, 2)), jax.random.key(1)
    )
    for planned, leaf in zip(jax.tree.leaves(placed), jax.tree.leaves(real), strict=True):
        assert planned.shape == leaf.shape and planned.dtype == leaf.dtype
        assert planned.sharding == leaf.sharding
