"""Oracles for drafters that draft a whole block in one pass.

These are P-EAGLE, DFlash, JetSpec, DSpark and DFlash2. There are two oracles, and tests compare
them with each other:

- the speculators package, independent torch code: it makes tiny random checkpoints here, and
  computes the states and the logits of blocks with its own classes (`speculators_blocks`);
- `SlowBlock`, the same network in NumPy, one query at a time, from the tensors of a checkpoint. It
  also covers what speculators has no class for: z-lab's layout, and JetSpec.

Terms: the *anchor* is the newest committed token, which the target has not read yet. A block is the
anchor and the mask tokens after it; its places are *slots*, and slot 0 is the anchor's. The
*context* is what the target has read: the positions before the anchor's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:  # functions import torch themselves, so that `SlowBlock` works without it
    import torch

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TARGET_LAYERS = 48, 32, 4, 2, 8, 6
MASK = VOCAB - 1
TAPS = (1, 3, 5)
"""The layers of the target whose *input* is read: speculators, vLLM and we count them so."""

BLOCK = 5
IDS = np.array([0, 2, 3, 5, 7, 8, 11, 13, 17, 19, 20, 23, 29, 31, 37, 41])
"""The tokens of the target that a drafter with a small vocabulary can draft."""

DRAFT_THETA = 3_000.0  # the target's theta differs


def needs_speculators() -> None:
    """Skip the test if speculators is missing; `make .venv-test/installed` installs it."""
    pytest.importorskip("speculators.models.dflash2", reason="speculators 0.9 is not installed")


# --- the target ---


@dataclass(frozen=True)
class Text:
    """A text, and what a tiny random target computes from it.

    Attributes:
        directory: the target's checkpoint.
        tokens: ``[T]``.
        features: ``[T, n, H]``, the residual stream entering each of the tapped layers.
        last: ``[T, H]``, the residual stream after the last layer, before the final norm.
        logits: ``[T, V]``, the target's logits.
        embedding: ``[V, H]``, the target's embedding.
        head: ``[V, H]``, the target's head.
    """

    directory: Path
    tokens: np.ndarray
    features: np.ndarray
    last: np.ndarray
    logits: np.ndarray
    embedding: np.ndarray
    head: np.ndarray


def make_text(
    directory: Path, kind: str = "qwen3", length: int = 24, taps: Sequence[int] = TAPS
) -> Text:
    """Return random tokens that a random target has read; write the target to ``directory``."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from tests.with_torch import torch

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    sizes = _layer_sizes(TARGET_LAYERS) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}
    }
    torch.manual_seed(1)
    model = model_class(config_class(**sizes, tie_word_embeddings=False)).eval()
    _randomise(model, 0.15)
    model.save_pretrained(directory)
    tokens = np.random.default_rng(0).integers(0, VOCAB - 1, length)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, inputs, _output: last.append(inputs[0]))
    with torch.no_grad():
        output = model(torch.tensor(tokens)[None], output_hidden_states=True)
    features = np.stack([output.hidden_states[tap][0].numpy() for tap in taps], axis=1)
    weights = load_file(directory / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    return Text(
        directory, tokens, features, last[0][0].numpy(), output.logits[0].numpy(), embedding, head
    )


def _layer_sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
    }


def _randomise(model: "torch.nn.Module", scale: float = 0.3) -> None:
    """Draw all parameters at random.

    The parameters that models start with, convolutions that do nothing and heads of zeros, would
    hide every error in these parts.
    """
    from tests.with_torch import torch

    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean, scale)


# --- checkpoints by speculators ---


def make_drafter(
    directory: Path,
    method: str,
    text: Text,
    *,
    layers: int = 2,
    ids: np.ndarray | None = None,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    kind: str = "qwen3",
    taps: Sequence[int] = TAPS,
    block_size: int = BLOCK,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return a random drafter that speculators has written to ``directory`` and read back.

    Args:
        directory: the folder to write the checkpoint to. It is created.
        method: "dflash", "dspark", "dflash2" or "peagle".
        text: the text of the target to draft for.
        layers: the number of layers of the drafter.
        ids: the target's tokens that it can draft, ascending; None for all.
        layer_types: "full_attention" or "sliding_attention" for each layer; None for full
            attention.
        sliding_window: the window of the sliding layers.
        kind: the kind of the layers, "qwen3" or (for P-EAGLE only) "llama".
        taps: the layers of the target whose input it reads.
        block_size: the slots of a block, including the anchor's. P-EAGLE has no block size.
        seed: the seed of the weights.
        options: fields of the method's configuration: ``sample_from_anchor``,
            ``sliding_window_non_causal``, ``markov_rank``, ``markov_head_type``,
            ``enable_confidence_head``, ``confidence_head_with_markov``, ``conv_group_size``,
            ``selector_rank``, ``selector_top_k``, ``norm_before_residual``, ``norm_before_fc``,
            ``fc_norm`` ...
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    from tests.with_torch import torch

    config_class, model_class = _classes(method)
    sizes = _layer_sizes(layers) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": DRAFT_THETA}
    }
    if layer_types is not None:
        sizes |= {
            "layer_types": list(layer_types),
            "sliding_window": sliding_window,
            "use_sliding_window": True,
        }
    layer = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind](**sizes)
    layer._attn_implementation = "eager"
    method_fields = {"eagle_aux_hidden_state_layer_ids": list(taps)}
    if method != "peagle":
        method_fields = {"aux_hidden_state_layer_ids": list(taps), "block_size": block_size}
    architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=VOCAB if ids is None else len(ids),
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(text.directory), architectures=[architecture["qwen3"]]
            ),
        ),
        **method_fields,
        **options,
    )
    torch.manual_seed(seed)
    model = model_class(config)
    _randomise(model)
    if ids is not None:
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[torch.tensor(ids)] = True
        model.load_vocab_mappings(t2d, torch.tensor(ids) - torch.arange(len(ids)))
    model.save_pretrained(directory)
    return read_drafter(directory, method)


def read_drafter(directory: Path, method: str) -> Any:
    """Return the drafter of a checkpoint as speculators reads it.

    What the checkpoint leaves out comes from the target that its config.json names.
    """
    from tests.with_torch import torch

    _, model_class = _classes(method)
    config = model_class.config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(str(directory), config=config, dtype=torch.float32).eval()


def _classes(method: str) -> tuple[Any, Any]:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

    return {
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
        "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    }[method]


# --- the layouts of other publishers, with the same tensors ---


def write_as(layout: str, source: Path, directory: Path, text: Text, **changes: Any) -> None:
    """Write a speculators checkpoint (full vocabulary) in another publisher's layout.

    Args:
        layout: "zlab" (DFlash2 if the checkpoint has its tensors, otherwise DFlash), "jetspec" or
            "deepspec".
        source: the directory of the speculators checkpoint.
        directory: the folder to write to. It is created.
        text: the target's text; DeepSpec's checkpoints contain copies of its embedding and head.
        changes: further fields of config.json.
    """
    raw = json.loads((source / "config.json").read_text())
    tensors = dict(load_file(source / "model.safetensors"))
    layer = raw["transformer_layer_config"]
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    config: dict[str, Any] = {name: layer[name] for name in names}
    config |= {
        "model_type": "qwen3",
        "num_target_layers": TARGET_LAYERS,
        "rope_theta": DRAFT_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "layer_types": layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"],
        "sliding_window": layer.get("sliding_window"),
        "use_sliding_window": layer.get("sliding_window") is not None,
        "dtype": "float32",
    }
    # These layouts number the layers whose output is read.
    outputs = [tap - 1 for tap in raw["aux_hidden_state_layer_ids"]]
    inner: dict[str, Any] = {"mask_token_id": raw["mask_token_id"], "target_layer_ids": outputs}
    if layout == "deepspec":
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": raw["block_size"],
            "num_anchors": 512,
            **inner,
        }
        config |= {
            "markov_rank": raw.get("markov_rank", 0),
            "enable_confidence_head": raw.get("enable_confidence_head", False),
        }
        config |= {
            name: raw[name]
            for name in ("markov_head_type", "confidence_head_with_markov")
            if name in raw
        }
        tensors |= {"embed_tokens.weight": text.embedding, "lm_head.weight": text.head}
    elif any("candidate_selector" in name for name in tensors):
        inner |= {
            name: raw[name]
            for name in ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k")
        }
        inner |= {"block_size": raw["block_size"]}  # DFlash has it outside of dflash_config
        config |= {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "dflash_config": inner,
        }
    else:
        inner |= {"causal_head": True} if layout == "jetspec" else {}
        config |= {
            "architectures": ["DFlashDraftModel"],
            "block_size": raw["block_size"],
            "dflash_config": inner,
        }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, directory / "model.safetensors")


# --- blocks by speculators ---


@dataclass(frozen=True)
class Blocks:
    """The outputs of a drafter for a block at each of A anchors.

    Attributes:
        anchors: ``[A]``, the positions of the anchors.
        states: ``[A, D, H]``, the states after the drafter's final norm, slot by slot.
        logits: ``[A, D, Vd]``, the logits of each slot, before a Markov head or a selector.
        chains: ``[A, K]``, the greedy draft, in the target's ids. A Markov head or a selector reads
            the tokens drafted before.
        corrected: ``[A, K, Vd]``, the logits that the chain's tokens were chosen from. With a
            selector these are its scores, and -inf for all other tokens.
        confidence: ``[A, K]``, the probability that each token is accepted, as the confidence head
            predicts it; None if there is no such head.
    """

    anchors: np.ndarray
    states: np.ndarray
    logits: np.ndarray
    chains: np.ndarray
    corrected: np.ndarray
    confidence: np.ndarray | None = None


def speculators_blocks(
    model: Any, text: Text, anchors: Sequence[int], depth: int = BLOCK - 1
) -> Blocks:
    """Return the blocks that speculators' own classes compute.

    ``depth`` is for P-EAGLE, whose blocks have no fixed size.
    """
    from tests.with_torch import torch

    with torch.no_grad():
        if type(model).__name__ == "PEagleDraftModel":
            return _peagle_blocks(model, text, anchors, depth)
        return _dflash_blocks(model, text, anchors)


def _batch(text: Text, length: int) -> "dict[str, torch.Tensor]":
    """Return the text as speculators' forward takes it, padded to ``length``.

    The padding has large values, so that a drafter that reads it fails the test.
    """
    from tests.with_torch import torch

    def filled(values: np.ndarray, filler: float) -> "torch.Tensor":
        missing = np.full((length - len(values), *values.shape[1:]), filler, values.dtype)
        return torch.tensor(np.concatenate([values, missing]))[None]

    return {
        "hidden_states": filled(text.features.reshape(len(text.tokens), -1), 1e3),
        "input_ids": filled(text.tokens, 0),
        "verifier_last_hidden_states": filled(text.last, 0.0),
        "document_ids": torch.zeros(1, length, dtype=torch.long),
    }


def _dflash_blocks(model: Any, text: Text, anchors: Sequence[int]) -> Blocks:
    """Return the blocks of a drafter of the DFlash family, which runs as in training.

    In training it samples anchors among the labels, so here the labels are the anchors.
    """
    from tests.with_torch import torch

    size, config = model.block_size, model.config
    batch = _batch(text, len(text.tokens) + size + 1)
    loss_mask = torch.zeros_like(batch["input_ids"])
    loss_mask[0, list(anchors)] = 1
    hidden, logits, *_ = model._backbone_forward(
        **batch, loss_mask=loss_mask, max_anchors=len(anchors)
    )
    hidden, logits = hidden.reshape(len(anchors), size, -1), logits.reshape(len(anchors), size, -1)
    first = 0 if config.sample_from_anchor else 1  # the first slot whose output is drafted from
    previous = batch["input_ids"][0, sorted(anchors)]
    chain, corrected, confidence, fed = [], [], [], [previous] * (first + 1)
    for slot in range(first, size):
        here = logits[:, slot]
        if getattr(model, "markov_head", None) is not None:
            # An RNN head reads all slots from 0 on, as in training.
            tokens = torch.stack(fed, dim=1)
            bias = model.markov_head.block_bias(
                prev_token_ids=tokens, hidden_states=hidden[:, : slot + 1]
            )
            here = here + bias[:, -1]
        if getattr(model, "confidence_head", None) is not None:
            inputs = [hidden[:, slot]]
            if config.confidence_head_with_markov:
                inputs.append(model.markov_head.prev_embeddings(previous))
            confidence.append(torch.sigmoid(model.confidence_head(torch.cat(inputs, dim=-1))))
        if hasattr(model, "candidate_selector"):
            tokens, scores = model.candidate_selector.select(here, hidden[:, slot], previous)
            here = torch.full_like(here, -torch.inf).scatter(1, tokens, scores)
        drafted = here.argmax(-1)
        previous = drafted if model.d2t is None else drafted + model.d2t[drafted]
        fed.append(previous)
        chain.append(previous)
        corrected.append(here)
    return Blocks(
        anchors=np.array(sorted(anchors)),
        states=hidden.numpy(),
        logits=logits.numpy(),
        chains=torch.stack(chain, dim=1).numpy(),
        corrected=torch.stack(corrected, dim=1).numpy(),
        confidence=torch.stack(confidence, dim=1).numpy() if confidence else None,
    )


def _peagle_blocks(model: Any, text: Text, anchors: Sequence[int], depth: int) -> Blocks:
    """Return the blocks of a P-EAGLE drafter.

    Its forward samples the places to predict; here they are fixed. Pair p is the feature of p and
    the token at p + 1, so the block of the anchor at n starts with pair n - 1.
    """
    from speculators.losses import eager
    from speculators.models.peagle import core

    from tests.with_torch import torch

    pairs, count = [anchor - 1 for anchor in anchors], len(text.tokens) - 1
    length = count + depth
    batch = _batch(text, length + 1)
    batch = {
        name: values[:, 1:] if name in ("input_ids",) else values[:, :-1]
        for name, values in batch.items()
    }
    at = torch.tensor([*range(length), *(pair for deep in range(1, depth) for pair in pairs)])
    depths = torch.tensor([0] * length + [deep for deep in range(1, depth) for _ in pairs])
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        model.norm.register_forward_hook(
            lambda _module, _inputs, output: outputs.update(states=output[0])
        ),
        model.lm_head.register_forward_hook(
            lambda _module, _inputs, output: outputs.update(logits=output[0])
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "generate_cod_sample_indices", lambda **_: (at, depths))
        model(**batch, num_depths=depth, loss_config={"kl_div": (eager.kl_div_loss, 1.0)})
    for hook in hooks:
        hook.remove()
    rows = np.array(
        [
            [pair, *(length + step * len(pairs) + i for step in range(depth - 1))]
            for i, pair in enumerate(pairs)
        ]
    )
    states, logits = outputs["states"][rows], outputs["logits"][rows]
    drafted = logits.argmax(-1)
    chains = drafted if model.d2t is None else drafted + model.d2t[drafted]
    return Blocks(np.array(anchors), states.numpy(), logits.numpy(), chains.numpy(), logits.numpy())


def speculators_loss(model: Any, text: Text, loss_mask: np.ndarray, **options: Any) -> float:
    """Return the loss of speculators' own training step, with every anchor that the mask allows.

    Args:
        model: a drafter of the DFlash family.
        text: the training text.
        loss_mask: ``[T]`` bool, the tokens that count. Anchors are the ones that are not among the
            last ``block_size`` tokens.
        options: ``losses``, weights by name ("ce", "tv", "kl_div", "nla", "lk_hybrid"), and
            arguments of the class's forward, such as ``gamma``, ``per_position_loss_weight``,
            ``dpace_alpha``, ``confidence_head_alpha``, ``selector_loss_alpha``.
    """
    from speculators.losses.utils import resolve_loss_config

    from tests.with_torch import torch

    config = resolve_loss_config(json.dumps(options.pop("losses", {"ce": 1.0})), "eager")
    if type(model).__name__ != "DFlashDraftModel":
        options["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    batch, mask = _batch(text, len(text.tokens)), torch.tensor(loss_mask.astype(int))[None]
    anchors = int(loss_mask[: -model.block_size].sum())
    with torch.no_grad():
        _, loss, _ = model(
            **batch, loss_mask=mask, max_anchors=anchors, loss_config=config, **options
        )
    return float(loss)


# --- blocks from the tensors alone, slowly ---


@dataclass(frozen=True)
class SlowBlock:
    """The networks of these drafters in NumPy, in double precision, one query at a time.

    Attributes:
        weights: the tensors of a checkpoint, by the names that all publishers of the DFlash family
            share, or by P-EAGLE's.
        embedding: ``[V, H]``, the embedding of the block's tokens.
        head: ``[Vd, H]``, the head.
        ids: ``[Vd]``, the target's ids of the drafter's tokens; None if they are the same.
        layer_types: as in config.json; empty for full attention.
        window: the window of the sliding layers: how many tokens they see.
        window_from: how the window of a query is counted. With "anchor" all slots see the last
            ``window`` tokens of the context (speculators' training). With "query" a slot sees
            ``window`` positions, including its own (SpecForge, FlashAttention).
        causal: by kind of layer, whether a slot sees no later slots.
        sample_from_anchor: whether slot 0 drafts, too.
        block_size: the number of slots.
        top_k: the number of the selector's candidates; 0 without a selector.
        markov: the kind of the Markov head, if there is one: "vanilla", "gated" or "rnn".
        embedding_factor: multiplies the embeddings of a block's tokens.
        logit_factor: multiplies the products with the head.
        logit_cap: the bound of the logits after that factor; None if they are unbounded.
        norm_before_residual: P-EAGLE's option, as in EAGLE-3.
        eps: the epsilon of the norms.
        theta: the theta of RoPE.
    """

    weights: dict[str, np.ndarray]
    embedding: np.ndarray
    head: np.ndarray
    ids: np.ndarray | None = None
    layer_types: tuple[str, ...] = ()
    window: int | None = None
    window_from: str = "anchor"
    causal: dict[str, bool] = field(default_factory=dict)
    sample_from_anchor: bool = False
    block_size: int = BLOCK
    top_k: int = 0
    markov: str = "vanilla"
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float | None = None
    norm_before_residual: bool = False
    eps: float = 1e-5
    theta: float = DRAFT_THETA

    # --- shared parts ---

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return RMSNorm over the last axis."""
        return (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weights[f"{name}.weight"]
        )

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return ``W x``, plus a bias if the checkpoint has one."""
        bias = self.weights.get(f"{name}.bias", 0.0)
        return x @ self.weights[f"{name}.weight"].astype(np.float64).T + bias

    def mlp(self, layer: str, x: np.ndarray) -> np.ndarray:
        """Return the output of the MLP: gate, up and down."""
        gate = self.linear(f"{layer}.mlp.gate_proj", x)
        return self.linear(
            f"{layer}.mlp.down_proj",
            gate / (1 + np.exp(-gate)) * self.linear(f"{layer}.mlp.up_proj", x),
        )

    def turned(self, x: np.ndarray, position: int) -> np.ndarray:
        """Return heads ``[heads, dim]`` with RoPE; the halves of a head are the pairs."""
        half = x.shape[-1] // 2
        angle = position * self.theta ** (-np.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ],
            axis=-1,
        )

    def key_value(self, layer: str, x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return key and value, ``[KV heads, dim]`` each, of a token with input ``x``."""
        key = self.linear(f"{layer}.self_attn.k_proj", x).reshape(KV_HEADS, HEAD_DIM)
        if f"{layer}.self_attn.k_norm.weight" in self.weights:  # Qwen3's layers, not Llama's
            key = self.norm(f"{layer}.self_attn.k_norm", key)
        value = self.linear(f"{layer}.self_attn.v_proj", x).reshape(KV_HEADS, HEAD_DIM)
        return self.turned(key, position), value

    def attend(
        self, layer: str, x: np.ndarray, position: int, visible: list[tuple[np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """Return the attention of one query over its visible keys and values."""
        query = self.linear(f"{layer}.self_attn.q_proj", x).reshape(HEADS, HEAD_DIM)
        if f"{layer}.self_attn.q_norm.weight" in self.weights:
            query = self.norm(f"{layer}.self_attn.q_norm", query)
        query, heads = self.turned(query, position), []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = np.array([query[head] @ key[shared] for key, _ in visible]) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            heads.append(
                sum(
                    weight * value[shared]
                    for weight, (_, value) in zip(weights / weights.sum(), visible, strict=True)
                )
            )
        return self.linear(f"{layer}.self_attn.o_proj", np.concatenate(heads))

    @property
    def layers(self) -> int:
        """Return the number of layers that the checkpoint has tensors for."""
        return 1 + max(
            int(name.split(".")[1]) for name in self.weights if name.startswith("layers.")
        )

    def own_ids(self, tokens: np.ndarray) -> np.ndarray:
        """Return the target's ids of drafted tokens."""
        return tokens if self.ids is None else self.ids[tokens]

    # --- the DFlash family ---

    def context(self, features: np.ndarray) -> np.ndarray:
        """Return the fused features ``[T, H]``, which all layers compute keys and values from."""
        return self.norm(
            "hidden_norm", self.linear("fc", features.reshape(len(features), -1).astype(np.float64))
        )

    def block(self, features: np.ndarray, anchor: int, length: int | None = None) -> np.ndarray:
        """Return the states ``[D, H]`` of the block that starts with token ``anchor``.

        Args:
            features: ``[n, taps, H]``, the features of the context only: the anchor is at position
                n.
            anchor: the token.
            length: the slots to run, for causal blocks; None for all.
        """
        start, size = len(features), self.block_size if length is None else length
        context = self.context(features)
        x = (
            self.embedding[[anchor] + [MASK] * (size - 1)].astype(np.float64)
            * self.embedding_factor
        )
        for index in range(self.layers):
            layer = f"layers.{index}"
            kind = self.layer_types[index] if self.layer_types else "full_attention"
            before = [self.key_value(layer, row, position) for position, row in enumerate(context)]
            normed = self.norm(f"{layer}.input_layernorm", x)
            normed, after = self.convolved(f"{layer}.attention_conv", normed)
            inside = [self.key_value(layer, row, start + slot) for slot, row in enumerate(normed)]
            attended = []
            for slot in range(size):
                first = 0
                if kind == "sliding_attention" and self.window is not None:
                    end = start if self.window_from == "anchor" else start + slot + 1
                    first = max(0, end - self.window)
                last = slot if self.causal.get(kind, False) else size - 1
                visible = before[first:] + inside[: last + 1]
                attended.append(self.attend(layer, normed[slot], start + slot, visible))
            x = x + after(np.stack(attended))
            normed, after = self.convolved(
                f"{layer}.mlp_conv", self.norm(f"{layer}.post_attention_layernorm", x)
            )
            x = x + after(self.mlp(layer, normed))
        return self.norm("norm", x)

    def convolved(self, name: str, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """Apply DFlash2's convolutions around a sublayer.

        Return the sublayer's normed input ``x [D, H]`` after the first convolution, and a function
        that applies the second one to the sublayer's output. The kernels of both depend on ``x``. A
        checkpoint without these tensors has no convolutions.
        """
        if f"{name}.base_kernel" not in self.weights:
            return x, lambda y: y
        base = self.weights[f"{name}.base_kernel"].astype(np.float64)  # [side, lag, H]
        kernel_size = base.shape[1]
        kernels = self.linear(f"{name}.kernel_projection", x)
        kernels = kernels.reshape(len(x), 2, kernel_size, -1)  # [slot, side, lag, group]

        def convolve(y: np.ndarray, side: int) -> np.ndarray:
            out = np.zeros_like(y)
            for slot in range(len(y)):
                for lag in range(min(kernel_size, slot + 1)):  # not beyond the start of the block
                    groups = kernels[slot, side, lag]
                    kernel = base[side, lag] + np.repeat(groups, HIDDEN // len(groups))
                    out[slot] += kernel * y[slot - lag]
            return out

        return convolve(x, 0), lambda y: convolve(y, 1)

    def draft(self, features: np.ndarray, anchor: int) -> tuple[list[int], np.ndarray, list[float]]:
        """Return the greedy chain, the logits of its choices, and the confidence in each token."""
        states = self.block(features, anchor)
        first, previous = 0 if self.sample_from_anchor else 1, anchor
        chain, corrected, confidence = [], [], []
        memory: np.ndarray | float = 0.0
        for slot, state in enumerate(states):
            logits = self.head.astype(np.float64) @ state * self.logit_factor
            if self.logit_cap is not None:
                logits = np.tanh(logits / self.logit_cap) * self.logit_cap
            before = self.weights.get("markov_head.markov_w1.weight")
            before = None if before is None else before[previous].astype(np.float64)
            if before is not None:
                inner, memory = self.markov_state(before, state, memory)
                output = self.weights["markov_head.markov_w2.weight"].astype(np.float64)
                logits = logits + output @ inner
            if slot < first:
                continue
            if "confidence_head.proj.weight" in self.weights:
                wide = self.weights["confidence_head.proj.weight"].shape[1] > HIDDEN
                inputs = np.concatenate([state, before]) if wide and before is not None else state
                logit = self.linear("confidence_head.proj", inputs)[0]
                confidence.append(float(1 / (1 + np.exp(-logit))))
            if self.top_k:
                logits = self.selected(logits, state, previous)
            token = int(np.argmax(logits))
            previous = int(self.own_ids(np.array(token)))
            chain.append(previous)
            corrected.append(logits)
        return chain, np.stack(corrected), confidence

    def markov_state(
        self, before: np.ndarray, state: np.ndarray, memory: np.ndarray | float
    ) -> tuple[np.ndarray, Any]:
        """Return the input of ``markov_w2``, and the RNN's new memory.

        Args:
            before: the embedding of the token before.
            state: the state of the slot.
            memory: the RNN's memory.
        """
        if self.markov == "vanilla":
            return before, memory
        if self.markov == "gated":
            joint = np.concatenate([state, before])
            gate = 1 / (1 + np.exp(-self.linear("markov_head.gate_proj", joint)))
            return gate * before, memory
        memory = memory + np.zeros_like(before)
        joint = self.linear("markov_head.joint_proj", np.concatenate([memory, before, state]))
        gate, candidate, output = np.split(joint, 3)
        gate = 1 / (1 + np.exp(-gate))
        return np.tanh(output), gate * memory + (1 - gate) * np.tanh(candidate)

    def selected(self, logits: np.ndarray, state: np.ndarray, previous: int) -> np.ndarray:
        """Return the selector's scores of the ``top_k`` likeliest tokens, and -inf for others."""
        name = "candidate_selector."
        best = np.argsort(-logits, kind="stable")[: self.top_k]
        context = self.weights[f"{name}predecessor_codebook"][previous] * self.linear(
            f"{name}hidden_projection", state
        )
        scores = np.full_like(logits, -np.inf)
        scores[best] = logits[best] + self.weights[f"{name}successor_codebook"][best] @ context
        return scores

    # --- P-EAGLE ---

    def peagle_block(
        self, features: np.ndarray, tokens: Sequence[int], anchor: int, depth: int
    ) -> np.ndarray:
        """Return the states ``[depth, H]`` of P-EAGLE's block, after the final norm.

        Pair p is the feature of p and the token at p + 1, so the last pair of n features contains
        the anchor. It is followed by pairs of the learnt feature and the mask token. All pairs see
        the ones before them.

        Args:
            features: ``[n, taps, H]``, the features of the context.
            tokens: ``[n]``, the tokens of the context.
            anchor: the token at n.
            depth: the number of tokens to draft.
        """
        mask_hidden = self.weights["mask_hidden"].reshape(1, -1)
        rows = np.concatenate(
            [features.reshape(len(features), -1), np.repeat(mask_hidden, depth - 1, axis=0)]
        )
        rows = self.normed_taps(rows.astype(np.float64), features.shape[1])
        fused = self.linear("fc", rows)
        x = fused
        embedded = self.embedding[[*tokens[1:], anchor, *[MASK] * (depth - 1)]].astype(np.float64)
        for index in range(self.layers):
            layer = f"layers.{index}"
            if index:
                normed = self.norm(f"{layer}.input_layernorm", x)
            else:
                hidden = self.norm(f"{layer}.hidden_norm", x)
                normed = np.concatenate(
                    [self.norm(f"{layer}.input_layernorm", embedded), hidden], axis=-1
                )
                x = hidden if self.norm_before_residual else x
            visible = [self.key_value(layer, row, place) for place, row in enumerate(normed)]
            attended = [
                self.attend(layer, row, place, visible[: place + 1])
                for place, row in enumerate(normed)
            ]
            x = x + np.stack(attended)
            x = x + self.mlp(layer, self.norm(f"{layer}.post_attention_layernorm", x))
        return self.norm("norm", x)[-depth:]

    def normed_taps(self, rows: np.ndarray, taps: int) -> np.ndarray:
        """Return the rows after the norms before ``fc``, if there are any."""
        if "input_norm.weight" in self.weights:
            return self.norm("input_norm", rows)
        if "fc_norm.0.weight" in self.weights:
            parts = np.split(rows, taps, axis=-1)
            return np.concatenate(
                [self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], axis=-1
            )
        return rows


def slow_of(directory: Path, text: Text, **options: Any) -> SlowBlock:
    """Return the `SlowBlock` of a checkpoint in any layout.

    The embedding and the head are the checkpoint's if it has them, otherwise the target's.
    """
    weights = dict(load_file(directory / "model.safetensors"))
    d2t = weights.get("d2t")
    ids = None if d2t is None else np.arange(len(d2t)) + d2t
    embedding = weights.get("embed_tokens.weight", text.embedding)
    head = weights.get("lm_head.weight", text.head)
    return SlowBlock(weights, embedding, head, ids, **options)
