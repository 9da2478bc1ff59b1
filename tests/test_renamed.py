"""Check that old names that users may have still work, and warn."""

import ast
import importlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax.drafters import Draft, Drafter, TrainedDrafter
from specjax.drafters.base import _OLD_METHODS, remote_entry_arrays, remote_input_shapes
from specjax.drafters.registry import DraftingMethod
from specjax.errors import InputError
from specjax.models.params import Param
from specjax.training.contract import StudentInputs
from tests.conftest import tiny_target


@pytest.mark.parametrize(
    ("module", "name", "renamed"),
    [
        ("specjax.training.contract", "Given", StudentInputs),
        ("specjax.drafters.base", "shapes_told", remote_input_shapes),
        ("specjax.drafters.base", "told_entries", remote_entry_arrays),
    ],
)
def test_an_old_name_works_and_warns(module, name, renamed) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"{module}.{name} has a new name: {renamed.__name__}"
    ) as caught:
        assert getattr(importlib.import_module(module), name) is renamed
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Gives'"):
        importlib.import_module(module).Gives  # noqa: B018 - only the access matters


def test_each_class_name_stands_for_one_class() -> None:
    """Check that a reader who finds a name in the code finds one class of it."""
    trees = (ast.parse(path.read_text()) for path in Path(specjax.__file__).parent.rglob("*.py"))
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("old", _OLD_METHODS)
def test_every_old_name_serves_under_the_new_one_also_from_a_mixin_or_a_drafter_of_ours(
    old: str,
) -> None:
    new = _OLD_METHODS[old]

    def by_old_name(self, *arguments): ...

    def by_new_name(self, *arguments): ...

    mixin = type("Mixin", (), {old: by_old_name})
    for bases, values in (
        ((Drafter,), {old: by_old_name}),
        ((specjax.Eagle3,), {old: by_old_name}),
        ((mixin, Drafter), {}),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old} has a new name: call it {new}"):
            drafter_class = type("Made", bases, values)
        assert getattr(drafter_class, new) is by_old_name
    assert getattr(type("Made", (Drafter,), {new: by_old_name}), old) is by_old_name
    # A class may define both names.
    both = type("Made", (Drafter,), {old: by_old_name, new: by_new_name})
    assert (getattr(both, old), getattr(both, new)) == (by_old_name, by_new_name)


def test_weights_are_quantized_by_the_old_name_too_which_warns(target) -> None:
    for model in (
        target,
        specjax.Eagle3.init(target, jax.random.key(1)),
        specjax.DraftModel(target),
    ):
        with pytest.warns(
            DeprecationWarning,
            match=f"{type(model).__name__}.narrow has a new name: call it quantize",
        ):
            quantized = model.narrow("int8")
        jax.tree.map(np.testing.assert_array_equal, quantized, model.quantize("int8"))


def test_a_drafter_with_the_old_names_of_its_methods_works_and_warns(target) -> None:
    with pytest.warns(
        DeprecationWarning, match="NewestToken.absorb has a new name: call it append_committed"
    ) as caught:

        @struct.dataclass
        class NewestToken(Drafter[jax.Array]):
            draft: specjax.Chain = struct.field(pytree_node=False, default=specjax.Chain(2))

            def start(self, target, batch, capacity):
                return jnp.zeros(batch, jnp.int32)

            def absorb(self, target, state, committed):
                super().absorb(target, state, committed)
                newest = jnp.take_along_axis(
                    committed.tokens, jnp.maximum(committed.count - 1, 0)[:, None], axis=1
                )[:, 0]
                return jnp.where(committed.count > 0, newest, state)

            def propose(self, target, state, root, sampling, keys, active):
                return Draft.chain(root, jnp.stack([state, root], axis=1)), state

    assert [warning.filename for warning in caught] == [__file__]
    prompts = np.array([[1, 2, 1, 2, 1, 2]])
    plain = specjax.generate(target, None, prompts, max_new_tokens=6)
    assert np.array_equal(
        specjax.generate(target, NewestToken(), prompts, max_new_tokens=6).tokens, plain.tokens
    )


@dataclass(frozen=True)
class TableConfig:
    vocab_size: int


def test_a_trained_drafter_with_its_format_in_methods_works_and_warns(tmp_path) -> None:
    with pytest.warns(
        DeprecationWarning,
        match=r"Table: give title, layouts, .*format_config, layout_of to a Check",
    ) as caught:

        @struct.dataclass
        class Table(TrainedDrafter[tuple[()]]):
            params: dict
            config: TableConfig = struct.field(pytree_node=False)
            draft: specjax.Chain = struct.field(pytree_node=False, default=specjax.Chain(2))
            mesh: jax.sharding.Mesh | None = struct.field(pytree_node=False, default=None)
            title = "a table"
            layouts = ("rows", "lines")

            @classmethod
            def recognises(cls, raw, tensors):
                return "table" in raw

            @classmethod
            def layout_of(cls, stored):
                return "lines" if "lines.weight" in stored.shapes else "rows"

            @classmethod
            def read_config(cls, stored):
                return TableConfig(stored.raw["table"])

            def format_config(self, layout, dtype, target):
                return {"table": self.config.vocab_size}

            @classmethod
            def declare(cls, config, layout="rows"):
                return {
                    "table": Param(
                        (config.vocab_size, config.vocab_size), ("vocab", None), f"{layout}.weight"
                    )
                }

            @classmethod
            def axis_units(cls, config):
                return {"vocab": config.vocab_size}

            @classmethod
            def init(cls, target, key):
                config = TableConfig(target.config.vocab_size)
                return cls(
                    params=cls._initialise(config, key, target), config=config, mesh=target.mesh
                )

    assert [warning.filename for warning in caught] == [__file__]
    drafter = Table.init(tiny_target(), jax.random.key(0))
    for layout in Table.layouts:
        drafter.save_pretrained(tmp_path / layout, layout=layout)
        read = Table.from_pretrained(tmp_path / layout)
        assert read.config == drafter.config and np.array_equal(
            read.params["table"], drafter.params["table"]
        )
    with pytest.raises(
        InputError, match="layout='x': a table is written in the layouts 'rows', 'lines'"
    ):
        drafter.save_pretrained(tmp_path / "x", layout="x")
    recognises = DraftingMethod.of("table", Table).recognises
    assert recognises is not None and recognises({"table": 3}, ()) and not recognises({}, ())
    with pytest.warns(DeprecationWarning, match="Other: give title to a CheckpointFormat"):
        derived = type("Other", (Table,), {"title": "another table"})
    assert (derived.title, derived.layouts, derived.checkpoint_format.declare) == (
        "another table",
        Table.layouts,
        derived.declare,
    )
