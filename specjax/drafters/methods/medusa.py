"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state.

Each head predicts a token one position further ahead than the head before.
"""

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
from specjax.errors import InputError, check_minimum
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, JsonObject, check_fields, whole
from specjax.models.params import Param, Params, matrix
from specjax.models.primitives import linear, vocabulary_logits
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@dataclass(frozen=True)
class MedusaConfig:
    """The sizes of a `Medusa` drafter.

    Attributes:
        hidden_size: the hidden size of the target.
        vocab_size: the vocabulary size of the target.
        heads: the number of heads.
        blocks: the number of residual blocks of a head.
    """

    hidden_size: int
    vocab_size: int
    heads: int
    blocks: int = 1

    def __post_init__(self) -> None:
        check_minimum(1, self, ["heads"])
        check_minimum(0, self, ["blocks"])


def read_config(stored: CheckpointFiles) -> MedusaConfig:
    """Return the configuration of a checkpoint. Raises `CheckpointError`."""
    rules = {"medusa_num_heads": whole(1, 100), "medusa_num_layers": whole(0, 100, default=1)}
    fields = check_fields(stored.raw, rules, stored.file)
    blocks, output = fields["medusa_num_layers"], f"0.{fields['medusa_num_layers']}.weight"
    if len(stored.shapes.get(output, ())) != 2:
        raise CheckpointError(
            f"{stored.directory}: the weights lack {output!r}, the output of the first head after"
            f" medusa_num_layers={blocks} blocks: give the weights of Medusa heads that this"
            " config.json describes"
        )
    vocab, hidden = stored.shapes[output]
    heads = stored.numbered("")
    # Published files may have more heads than their config.json states.
    if heads < fields["medusa_num_heads"]:
        stored.check_count("medusa_num_heads", fields["medusa_num_heads"], heads, "heads")
    for head in range(heads):
        stored.check_count(
            "medusa_num_layers", blocks, stored.numbered(f"{head}.") - 1, f"blocks in head {head}"
        )
    return MedusaConfig(hidden, vocab, heads, blocks)


def declare(config: MedusaConfig, layout: str) -> Params:
    """Return the `Param` declarations, under the authors' names.

    The blocks of a head are numbered, and its output layer has the number after them.
    """
    hidden = (config.hidden_size, None)

    def declare_block(name: str) -> Params:  # begins as the identity
        weight = replace(matrix(name, hidden, hidden), init="zeros")
        return {
            "linear": weight,
            "linear_bias": Param((config.hidden_size,), (None,), f"{name}.bias", "zeros"),
        }

    def declare_head(head: int) -> Params:
        return {
            "blocks": [declare_block(f"{head}.{block}.linear") for block in range(config.blocks)],
            "output": matrix(f"{head}.{config.blocks}", hidden, (config.vocab_size, "vocab")),
        }

    return {"heads": [declare_head(head) for head in range(config.heads)]}


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    return {"medusa_num_heads": drafter.config.heads, "medusa_num_layers": drafter.config.blocks}


@struct.dataclass
class Medusa(NewestStateDrafter):
    """Heads that draft several tokens at once: head i predicts the token at depth i + 1.

    That is the token i + 2 positions after the one whose hidden state it reads. A head does not
    know what the heads before it have drafted, so its likeliest tokens are the same below every
    node of a level. Therefore a wide tree helps more than a deep one. Checkpoints are the authors':
    config.json, and ``medusa_lm_head`` as safetensors or ``.pt``.

    Attributes:
        params: the parameters of the heads (see `declare`).
        config: the configuration.
        draft: the shape of the drafts, at most as deep as the number of heads.
        mesh: the mesh of the parameters.

    Examples:
        >>> drafter = specjax.Medusa.init(target, jax.random.key(1), heads=2, draft=2)
        >>> states, _ = target.read(prompts)
        >>> drafter.head(0, states.hidden).shape  # logits of the token after the next one
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
        """Return the authors' tree, cut to the number of heads."""
        return StaticTree(tuple(path for path in MEDUSA_TREE if len(path) <= config.heads))

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int | None = None,
        *,
        heads: int = 5,
        blocks: int = 1,
    ) -> Self:
        """Return heads for ``target``, which start as copies of its own head, as the authors' do.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts; None is `default_draft`.
            heads: the number of heads.
            blocks: the number of residual blocks of a head.
        """
        config = MedusaConfig(target.config.hidden_size, target.config.vocab_size, heads, blocks)
        params = cls._initialise(config, key, target)
        for head in params["heads"]:
            head["output"] = target.head_weights
        draft = cls.default_draft(config) if draft is None else draft
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    def check(self, target: Target) -> None:
        config, sizes = self.config, (target.config.hidden_size, target.config.vocab_size)
        if (config.hidden_size, config.vocab_size) != sizes:
            raise InputError(
                "drafter: these Medusa heads were made for a target of hidden size"
                f" {config.hidden_size} with {config.vocab_size} tokens, but target has {sizes[0]}"
                f" and {sizes[1]}: give the target that they were made for"
            )
        if self.draft_shape.depth > config.heads:
            raise InputError(
                f"draft={self.draft}: {self.draft_shape.depth} deep, but there are {config.heads}"
                " heads; give at most as many"
            )
        self.draft_shape.check(config.vocab_size)
        check_mesh(self.mesh, target)

    def head(self, index: int, states: jax.Array) -> jax.Array:
        """Return a head's float32 logits ``[..., V]`` after tokens with ``states [..., H]``."""
        head, x = self.params["heads"][index], states
        for block in head["blocks"]:
            x = x + jax.nn.silu(linear(block, "linear", x))
        logits = vocabulary_logits(x, head["output"])
        axes = ("batch", *(None,) * (logits.ndim - 2), "vocab")
        return sharding.constrain(logits, axes, self.units, self.mesh)

    def propose(
        self,
        target: Target,
        state: jax.Array,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, jax.Array]:
        # ``[B, D, V]``
        logits = jnp.stack([self.head(i, state) for i in range(self.draft_shape.depth)], axis=1)
        return expand_by_depth(self.draft_shape, logits, root, sampling, keys, active), state

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return all weights, read once: all levels are drafted in one pass."""
        return DraftingReads(step=self.own_weights)
