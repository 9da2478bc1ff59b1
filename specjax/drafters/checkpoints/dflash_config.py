"""The configuration and the parameters of DFlash drafters, which include DSpark and DFlash2."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import jax

from specjax.drafters.draft_vocabulary import declare_d2t
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.config import ModelConfig
from specjax.models.params import Param, Params, matrix, norm

Markov = Literal["vanilla", "gated", "rnn"]
"""The kind of a Markov head.

It computes from the token before: "vanilla", a vector; "gated", a vector that is weighted by a gate
that reads the state; "rnn", the output of a recurrent cell that has read all tokens of the block.
"""


@dataclass(frozen=True)
class DFlashConfig:
    """The configuration of a `DFlash`; with heads, of a `DSpark`; with a selector, of a `DFlash2`.

    Attributes:
        layer: the configuration of its layers, which are a Qwen3's; ``vocab_size`` is the target's.
        block_size: the number of tokens of a block, the anchor included.
        mask_token_id: the token that marks positions without a drafted token.
        taps: the target layers whose *input* the drafter reads, ascending. The index after the last
            layer stands for the output of the last layer.
        draft_vocab_size: the number of tokens that the drafter can draft, Vd.
        causal: whether tokens of a block see only the tokens before them (JetSpec).
        from_anchor: whether the anchor predicts the first drafted token. Otherwise the token after
            the anchor does, and the anchor predicts nothing.
        window_of_block: whether a window is counted from the anchor: all tokens of a block see the
            same ``window`` tokens before the anchor. Otherwise it is counted from each token, that
            token included.
        causal_in_window: the same as ``causal``, for layers with a window.
        own_ids: whether a table maps the drafter's tokens to the target's. Otherwise the ids are
            the same.
        own_embedding: whether the drafter has an embedding of its own and does not use the
            target's.
        own_head: whether the drafter has a head of its own and does not use the target's.
        markov_rank: the rank of the Markov head's matrix; 0 if there is no such head.
        markov: the kind of the Markov head, see `Markov`.
        confidence: whether a head predicts how likely each drafted token is to be accepted.
        confidence_of_token: whether that head also reads the token before.
        conv_kernel_size: the number of tokens that a convolution around attention or MLP reads, the
            token itself included; 0 if there are no convolutions.
        conv_group_size: the number of channels that share what a position adds to the kernel of its
            convolution.
        selector_rank: the rank of the codebooks with which the selector scores candidates; 0 if
            there is no selector.
        selector_top_k: the number of candidates at each position, K: the likeliest tokens by the
            logits of the block.
        input_embedding_scale: the factor of the embeddings of a block's tokens, in addition to the
            target's own factor, if any.
        output_multiplier: the factor of the products with the head, see `scales_logits`.
        final_logit_softcapping: the bound of the logits after that factor,
            ``cap * tanh(logits / cap)``; None for no bound.
        embedding_normed: whether the embeddings of a block's tokens are normed, if the target
            norms its embeddings. Those of Muse Glimmer's assistant are not.
        target_layers: the number of the target's layers, if known, because SpecForge needs it. It
            changes no computation. Configurations that differ only in it are equal.
    """

    layer: ModelConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    draft_vocab_size: int
    causal: bool = False
    from_anchor: bool = False
    window_of_block: bool = False
    causal_in_window: bool = False
    own_ids: bool = False
    own_embedding: bool = False
    own_head: bool = False
    markov_rank: int = 0
    markov: Markov = "vanilla"
    confidence: bool = False
    confidence_of_token: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    embedding_normed: bool = True
    target_layers: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < 1 + (not self.from_anchor):
            raise InputError(
                f"block_size={self.block_size}: it leaves no token to draft; give more"
            )
        if not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise InputError(
                f"mask_token_id={self.mask_token_id}: must be one of the target's"
                f" {self.layer.vocab_size} tokens"
            )
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise InputError(
                f"taps={self.taps}: they must be different layers of the target, ascending"
            )
        if self.own_ids and not self.own_head:
            raise InputError(
                "lm_head is missing: a drafter with a vocabulary of its own needs a head of its own"
            )
        if self.confidence_of_token and not (self.confidence and self.markov_rank):
            raise InputError(
                "confidence_head_with_markov: it needs a confidence head, and a Markov head of a"
                " rank above 0"
            )
        for name, value in self.changed_factors.items():
            if value is None or not 0 < value < math.inf:
                raise InputError(f"{name}={value}: must be a finite number above 0")
            if self.own_embedding or self.own_head:
                raise InputError(
                    f"{name}={value}: it is for a drafter that uses its target's embedding and"
                    " head; leave it out"
                )
        if any(self.of_dflash2.values()):
            self._check_dflash2()

    @property
    def of_dflash2(self) -> dict[str, int]:
        """The fields that only a DFlash2 has."""
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        return {name: getattr(self, name) for name in names}

    def _check_dflash2(self) -> None:
        size, group, _, top_k = self.of_dflash2.values()
        if min(self.of_dflash2.values()) < 1:
            stated = ", ".join(f"{name}={value}" for name, value in self.of_dflash2.items())
            raise InputError(
                f"{stated}: a DFlash2 has convolutions and a selector; each must be at least 1"
            )
        if size > self.block_size:
            raise InputError(
                f"conv_kernel_size={size}: must be at most block_size={self.block_size}"
            )
        if self.layer.hidden_size % group:
            raise InputError(
                f"conv_group_size={group}: must divide the hidden size, {self.layer.hidden_size}"
            )
        if top_k > self.layer.vocab_size:
            raise InputError(
                f"selector_top_k={top_k}: must be at most the number of tokens,"
                f" {self.layer.vocab_size}"
            )
        if self.layer.model_type != "qwen3":
            raise InputError(
                f"model_type={self.layer.model_type!r}: the layers of a DFlash2 are those of a"
                " 'qwen3'"
            )
        if self.own_ids:
            raise InputError(
                "d2t: a DFlash2 drafts any of its target's tokens, and has no vocabulary of its own"
            )
        if self.has_heads:
            raise InputError(
                "a DFlash2 has neither a Markov head nor a confidence head: its selector is in"
                " their place"
            )

    @property
    def depth(self) -> int:
        """The maximum number of tokens of a draft."""
        return self.block_size - (not self.from_anchor)

    @property
    def changed_factors(self) -> dict[str, float]:
        """The factors and bounds of embeddings and logits that have an effect, by name."""
        unchanged = {
            "input_embedding_scale": 1.0,
            "output_multiplier": 1.0,
            "final_logit_softcapping": None,
        }
        return {
            name: getattr(self, name)
            for name, value in unchanged.items()
            if getattr(self, name) != value
        }

    @property
    def scales_logits(self) -> bool:
        """True if the logits have a factor or a bound of the drafter's own.

        Then these replace the target's. Without them the logits are those of the target's head.
        """
        return self.output_multiplier != 1.0 or self.final_logit_softcapping is not None

    @property
    def has_heads(self) -> bool:
        """True for a DSpark."""
        return self.markov_rank > 0 or self.confidence

    @property
    def has_selector(self) -> bool:
        """True for a DFlash2."""
        return self.selector_rank > 0


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Return ``count`` taps of a target with ``layers`` layers, spread as z-lab does.

    They go from the output of the second layer to that of the third layer from the end. For a
    target of fewer than 7 layers they are spread over all layers; there may be fewer than
    ``count``.
    """
    if count == 1:
        return (layers // 2 + 1,)
    first, last = (1, layers - 3) if layers >= 7 else (0, layers - 1)
    return tuple(
        sorted({1 + round(first + i * (last - first) / (count - 1)) for i in range(count)})
    )


def declare(config: DFlashConfig, layout: str) -> Params:
    """Return the `Param` declarations; the names are those of ``layout``."""
    if layout == "muse_glimmer":
        return jax.tree.map(_of_muse_glimmer, declare(config, "dflash"))
    layer, hidden, rank = config.layer, config.layer.hidden_size, config.markov_rank
    inputs_hidden = (hidden, None)
    tree: Params = {
        "layers": [_declare_layer(config, i) for i in range(layer.num_layers)],
        "fc": matrix("fc", (len(config.taps) * hidden, None), inputs_hidden),
        "hidden_norm": norm("hidden_norm", hidden),
        "norm": norm("norm", hidden),
    }
    if config.own_embedding:
        tree["embed"] = Param((layer.vocab_size, hidden), ("vocab", None), "embed_tokens.weight")
    if config.own_head:
        tree["lm_head"] = matrix("lm_head", inputs_hidden, (config.draft_vocab_size, "draft_vocab"))
    if config.own_ids:
        tree["d2t"] = declare_d2t(config.draft_vocab_size)
    if rank:
        tree["markov_in"] = Param(
            (layer.vocab_size, rank), ("vocab", None), "markov_head.markov_w1.weight"
        )
        tree["markov_out"] = matrix(
            "markov_head.markov_w2", (rank, None), (config.draft_vocab_size, "draft_vocab")
        )
    if rank and config.markov != "vanilla":
        name, inputs, outputs = ("gate", 1, 1) if config.markov == "gated" else ("joint", 2, 3)
        tensor = f"markov_head.{name}_proj"
        tree[f"markov_{name}"] = matrix(
            tensor, (hidden + inputs * rank, None), (outputs * rank, None)
        )
        tree[f"markov_{name}_bias"] = Param((outputs * rank,), (None,), f"{tensor}.bias", "zeros")
    if config.confidence:
        tree["confidence"] = matrix(
            "confidence_head.proj", (hidden + rank * config.confidence_of_token, None), (1, None)
        )
        tree["confidence_bias"] = Param((1,), (None,), "confidence_head.proj.bias", "zeros")
    if config.has_selector:
        name, codebook = "candidate_selector", (layer.vocab_size, config.selector_rank)
        tree["predecessors"] = Param(codebook, ("vocab", None), f"{name}.predecessor_codebook")
        tree["successors"] = Param(codebook, ("vocab", None), f"{name}.successor_codebook")
        tree["selector"] = matrix(
            f"{name}.hidden_projection", inputs_hidden, (config.selector_rank, None)
        )
    return tree


def _of_muse_glimmer(param: Param) -> Param:
    """Return a declaration with the name that Muse Glimmer's assistant has for the tensor."""
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    for ours, theirs in names.items():
        if param.name.startswith(ours):
            return replace(param, name=theirs + param.name.removeprefix(ours))
    return param


def _declare_layer(config: DFlashConfig, index: int) -> Params:
    prefix = f"layers.{index}."
    hidden = config.layer.hidden_size
    kernel_size = config.conv_kernel_size
    declared: Params = declarations.declare_layer(config.layer, prefix, index)
    if not kernel_size:
        return declared
    # 2, for the convolutions before and after the part.
    kernels = 2 * kernel_size * (hidden // config.conv_group_size)
    for part in ("attention", "mlp"):
        name = f"{prefix}{part}_conv"
        declared[f"{part}_conv"] = replace(
            matrix(f"{name}.kernel_projection", (hidden, None), (kernels, None)), init="zeros"
        )
        declared[f"{part}_conv_base"] = Param(
            (2, kernel_size, hidden), (None, None, None), f"{name}.base_kernel", "zeros"
        )
    return declared
