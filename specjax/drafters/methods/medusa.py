"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, each for a token further ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.drafters.base import DraftingReads, check_mesh
from specjax.drafters.expansion import expand_by_depth
from specjax.drafters.trained import CheckpointFormat, NewestStateDrafter, TrainedDrafter
from specjax.drafts.draft import Draft
from specjax.drafts.published import MEDUSA_TREE
from specjax.drafts.shapes import DraftShape, StaticTree
from specjax.errors import InputError
from specjax.models.cache import Entry
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, check_fields, whole
from specjax.models.params import Param, Params, matrix
from specjax.models.primitives import linear, vocabulary_logits
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


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


def read_config(stored: CheckpointFiles) -> MedusaConfig:
    """Return the shape of a checkpoint. Raises `CheckpointError`."""
    known = {"medusa_num_heads": whole(1, 100), "medusa_num_layers": whole(0, 100, default=1)}
    fields = check_fields(stored.raw, known, stored.file)
    blocks, output = fields["medusa_num_layers"], f"0.{fields['medusa_num_layers']}.weight"
    if len(stored.shapes.get(output, ())) != 2:
        raise CheckpointError(
            f"{stored.directory}: has no {output!r}, the output of the first head after medusa_num_layers={blocks} blocks: "
            "these are not the weights of Medusa heads of this config.json"
        )
    vocab, hidden = stored.shapes[output]
    heads = stored.numbered("")
    if heads < fields["medusa_num_heads"]:  # published files may hold more heads than their config.json says
        stored.check_count("medusa_num_heads", fields["medusa_num_heads"], heads, "heads")
    for head in range(heads):
        stored.check_count("medusa_num_layers", blocks, stored.numbered(f"{head}.") - 1, f"blocks in head {head}")
    return MedusaConfig(hidden, vocab, heads, blocks)


def declare(config: MedusaConfig, layout: str) -> Params:
    """Return the `Param` declarations, named as the authors name them: a head's blocks by number, and after them its output."""
    hidden = (config.hidden_size, None)

    def declare_block(name: str) -> Params:  # begins as the identity
        weight = replace(matrix(name, hidden, hidden), init="zeros")
        return {"linear": weight, "linear_bias": Param((config.hidden_size,), (None,), f"{name}.bias", "zeros")}

    def declare_head(head: int) -> Params:
        return {
            "blocks": [declare_block(f"{head}.{block}.linear") for block in range(config.blocks)],
            "output": matrix(f"{head}.{config.blocks}", hidden, (config.vocab_size, "vocab")),
        }

    return {"heads": [declare_head(head) for head in range(config.heads)]}


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> dict[str, Any]:
    return {"medusa_num_heads": drafter.config.heads, "medusa_num_layers": drafter.config.blocks}


@struct.dataclass
class Medusa(NewestStateDrafter):
    """Head i predicts the token i + 2 places after the one whose hidden state it reads: i + 1 below the root.

    A head does not know what the heads before it have drafted. So its best tokens are the same below every node of a level, and
    a wide tree pays more than a deep one. Checkpoints are the authors': config.json, and ``medusa_lm_head`` as safetensors or
    ``.pt``.

    Attributes:
        params: of the heads (see `declare`).
        config: its configuration.
        draft: the shape of its drafts, at most as deep as there are heads.
        mesh: where the params live.

    Examples:
        >>> drafter = specjax.Medusa.init(target, jax.random.key(1), heads=2, draft=2)
        >>> states, _ = target.read(prompts)
        >>> drafter.head(0, states.hidden).shape  # logits of the token two places further on
        (2, 6, 16)
    """

    params: Params
    config: MedusaConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=StaticTree(MEDUSA_TREE))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    grows_trees: ClassVar[bool] = True

    checkpoint_format: ClassVar[CheckpointFormat] = CheckpointFormat(
        title="Medusa heads",
        layouts=("medusa",),
        recognises=lambda raw, tensors: "medusa_num_heads" in raw,
        read_config=read_config,
        declare=declare,
        axis_units=lambda config: {"vocab": config.vocab_size},
        format_config=_format_config,
    )

    @classmethod
    def default_draft(cls, config: MedusaConfig) -> StaticTree:
        """The authors' tree, as deep as there are heads."""
        return StaticTree(tuple(path for path in MEDUSA_TREE if len(path) <= config.heads))

    @classmethod
    def init(
        cls, target: Target, key: jax.Array, draft: DraftShape | int | None = None, *, heads: int = 5, blocks: int = 1
    ) -> Self:
        """Heads for ``target``; consumes ``key``. Each begins as a copy of the target's own head, as the authors' do."""
        config = MedusaConfig(target.config.hidden_size, target.config.vocab_size, heads, blocks)
        params = cls._initialise(config, key, target)
        for head in params["heads"]:
            head["output"] = target.head_weights
        draft = cls.default_draft(config) if draft is None else draft
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    def check(self, target: Target) -> None:
        own, theirs = self.config, target.config
        if (own.hidden_size, own.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
            raise InputError(
                f"drafter: these Medusa heads were made for a target of hidden size {own.hidden_size} with {own.vocab_size} "
                f"tokens, and target has {theirs.hidden_size} and {theirs.vocab_size}: give the target that they were made for"
            )
        if self.draft_shape.depth > own.heads:
            raise InputError(
                f"draft={self.draft}: {self.draft_shape.depth} deep, but there are {own.heads} heads; give at most as many"
            )
        self.draft_shape.check(own.vocab_size)
        check_mesh(self.mesh, target)

    def head(self, index: int, states: jax.Array) -> jax.Array:
        """``[..., V]`` float32, what head ``index`` expects after tokens with ``states [..., H]``."""
        head, x = self.params["heads"][index], states
        for block in head["blocks"]:
            x = x + jax.nn.silu(linear(block, "linear", x))
        logits = vocabulary_logits(x, head["output"])
        axes = ("batch", *(None,) * (logits.ndim - 2), "vocab")
        return sharding.constrain(logits, axes, self.units, self.mesh)

    @property
    def target_hidden_size(self) -> int:
        return self.config.hidden_size

    def propose(
        self, target: Target, state: jax.Array, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, jax.Array]:
        every = jnp.stack([self.head(i, state) for i in range(self.draft_shape.depth)], axis=1)  # [B, D, V]
        return expand_by_depth(self.draft_shape, every, root, sampling, keys, active), state

    def drafting_reads(self, target: Target, state: jax.Array | tuple[()] = (), cache: Sequence[Entry] = ()) -> DraftingReads:
        """All levels are drafted at once."""
        return DraftingReads(step=self.own_weights)
