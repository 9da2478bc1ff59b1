"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, each for a token further ahead."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.draft import Draft
from specjax.drafters.base import Drafter, Seen, check_mesh
from specjax.drafters.expansion import Frontier, expand
from specjax.errors import InputError
from specjax.models import checkpoint, huggingface
from specjax.models import params as declarations
from specjax.models.fields import CheckpointError, check_fields, read_json, whole
from specjax.models.params import Param, Params, matrix
from specjax.models.primitives import linear, vocabulary_logits
from specjax.models.transformer import Target, default_dtype
from specjax.sampling import RowSampling
from specjax.tree import MEDUSA_TREE, Shape, StaticTree


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of a `Medusa`.

    Attributes:
        hidden_size: the target's.
        vocab_size: the target's.
        heads: how many.
        blocks: residual blocks in each.
    """

    hidden_size: int
    vocab_size: int
    heads: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.heads < 1 or self.blocks < 0:
            raise InputError(f"heads={self.heads}, blocks={self.blocks}: must be at least 1 and 0")

    @property
    def axis_units(self) -> dict[str, int]:
        """As `ModelConfig.axis_units`."""
        return {"vocab": self.vocab_size}


def declare(config: MedusaConfig) -> Params:
    """The `Param` declarations, named as in the authors' checkpoints: a head's blocks by number, and after them its output."""
    hidden = (config.hidden_size, None)

    def declare_block(name: str) -> Params:  # begins as the identity
        weight = Param((config.hidden_size,) * 2, (None, None), f"{name}.weight", "zeros", transposed=True)
        return {"linear": weight, "linear_bias": Param((config.hidden_size,), (None,), f"{name}.bias", "zeros")}

    def declare_head(head: int) -> Params:
        return {
            "blocks": [declare_block(f"{head}.{block}.linear") for block in range(config.blocks)],
            "output": matrix(f"{head}.{config.blocks}", hidden, (config.vocab_size, "vocab")),
        }

    return {"heads": [declare_head(head) for head in range(config.heads)]}


def default_draft(heads: int) -> StaticTree:
    """The authors' tree, as deep as there are heads."""
    return StaticTree(tuple(path for path in MEDUSA_TREE if len(path) <= heads))


def is_medusa(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of Medusa heads."""
    return "medusa_num_heads" in raw


def _read_config(directory: Path) -> MedusaConfig:
    file, shapes = directory / "config.json", checkpoint.stored_shapes(directory)
    known = {"medusa_num_heads": whole(1, 100), "medusa_num_layers": whole(0, 100, default=1)}
    fields = check_fields(read_json(file), known, str(file))
    output = f"0.{fields['medusa_num_layers']}.weight"
    if len(shapes.get(output, ())) != 2:
        raise CheckpointError(
            f"{directory}: has no {output!r}, the output of the first head after medusa_num_layers="
            f"{fields['medusa_num_layers']} blocks: these are not the weights of Medusa heads of this config.json"
        )
    vocab, hidden = shapes[output]
    # Published files may hold more heads than their config.json says.
    stored = {name.partition(".")[0] for name in shapes}
    heads = max(fields["medusa_num_heads"], sum(f"{i}" in stored for i in range(len(stored))))
    return MedusaConfig(hidden, vocab, heads, fields["medusa_num_layers"])


@struct.dataclass
class Medusa(Drafter):
    """Head i predicts the token i + 2 places after the one whose hidden state it reads: i + 1 below the root.

    A head does not know what the heads before it have drafted. So its best tokens are the same below every node of a level, and
    a wide tree pays more than a deep one.

    Attributes:
        params: of the heads (see `declare`).
        config: its shape.
        draft: the shape of its drafts, at most as deep as there are heads.
        mesh: where the params live.
    """

    params: Params
    config: MedusaConfig = struct.field(pytree_node=False)
    draft: Shape = struct.field(pytree_node=False, default=StaticTree(MEDUSA_TREE))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    grows_trees: ClassVar[bool] = True

    @classmethod
    def from_pretrained(
        cls, path: str | Path, draft: Shape | None = None, dtype: Any = None, mesh: Mesh | None = None
    ) -> "Medusa":
        """Load the authors' checkpoints: config.json, and ``medusa_lm_head`` as safetensors or ``.pt``.

        Args:
            path: directory, or hub id.
            draft: the shape of its drafts; None: `default_draft`.
            dtype: of the params; the default is that of `Target.from_pretrained`. It should be the target's.
            mesh: the target's.

        Raises:
            CheckpointError: a file, a field or a tensor is not as it must be.
        """
        directory = huggingface.locate(path)
        config = _read_config(directory)
        params = checkpoint.read(
            directory,
            declare(config),
            dtype or default_dtype(),
            what="Medusa heads with this config.json",
            mesh=mesh,
            units=config.axis_units,
        )
        return cls(params=params, config=config, draft=draft or default_draft(config.heads), mesh=mesh)

    @classmethod
    def init(cls, target: Target, key: jax.Array, draft: Shape | None = None, *, heads: int = 5, blocks: int = 1) -> "Medusa":
        """Heads for ``target``; consumes ``key``. Each begins as a copy of the target's own head, as the authors' do."""
        config = MedusaConfig(target.config.hidden_size, target.config.vocab_size, heads, blocks)
        params = declarations.initialise(declare(config), key, target.dtype, target.mesh, config.axis_units)
        for head in params["heads"]:
            head["output"] = target.head_weights
        return cls(params=params, config=config, draft=draft or default_draft(heads), mesh=target.mesh)

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write a checkpoint under the authors' names, in ``dtype`` (by default its own). All of it or nothing."""
        content = {"medusa_num_heads": self.config.heads, "medusa_num_layers": self.config.blocks}
        checkpoint.write(Path(path), declare(self.config), self.params, {"config.json": content}, dtype)

    def check(self, target: Target) -> None:
        own, theirs = self.config, target.config
        if (own.hidden_size, own.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
            raise InputError(
                f"drafter: these Medusa heads were made for a target of hidden size {own.hidden_size} with {own.vocab_size} "
                f"tokens, and target has {theirs.hidden_size} and {theirs.vocab_size}: give the target that they were made for"
            )
        if self.draft.depth > own.heads:
            raise InputError(
                f"draft={self.draft}: {self.draft.depth} deep, but there are {own.heads} heads; give at most as many"
            )
        self.draft.check(own.vocab_size)
        check_mesh(self.mesh, target)

    def head(self, number: int, states: jax.Array) -> jax.Array:
        """``[..., V]`` float32, what head ``number`` expects after tokens with ``states [..., H]``."""
        head, x = self.params["heads"][number], states
        for block in head["blocks"]:
            x = x + jax.nn.silu(linear(block, "linear", x))
        logits = vocabulary_logits(x, head["output"])
        axes = ("batch", *(None,) * (logits.ndim - 2), "vocab")
        return sharding.constrain(logits, axes, self.config.axis_units, self.mesh)

    def start(self, target: Target, batch: int, capacity: int) -> jax.Array:
        """``[B, H]`` the target's state at each row's newest token that it has read."""
        newest = jnp.zeros((batch, self.config.hidden_size), target.dtype)
        return sharding.constrain(newest, ("batch", None), {}, self.mesh)

    def absorb(self, target: Target, state: jax.Array, seen: Seen) -> jax.Array:
        return seen.newest(seen.output.hidden, state)

    def propose(
        self, target: Target, state: jax.Array, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, jax.Array]:
        every = jnp.stack([self.head(i, state) for i in range(self.draft.depth)], axis=1)  # [B, D, V]

        def read(frontier: Frontier, _: tuple[()]) -> tuple[jax.Array, tuple[()]]:
            level = jnp.take(every, frontier.depth, axis=1)
            return jnp.broadcast_to(level[:, None], (*frontier.tokens.shape, every.shape[-1])), ()

        draft, _, _ = expand(self.draft, read, every[:, 0], (), root, sampling, keys, active)
        return draft, state
