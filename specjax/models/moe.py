"""Sparse mixture of experts, dropless: every token goes to all of its experts, whatever the others choose.

Many implementations give an expert a capacity, and drop the tokens beyond it. What the model says of one token would then
depend on the rest of the batch, and on what was drafted beside it: the target would not be one distribution, and speculative
decoding not lossless. Here the tokens of a call are independent.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax import sharding
from specjax.models.config import ModelConfig, MoE
from specjax.models.params import Params
from specjax.models.primitives import activate, linear, mlp, rms_norm
from specjax.shape_checks import shape_checked


def mixture(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T H"],
    mesh: Mesh | None = None,
    routed: Float[Array, "B T H"] | None = None,
) -> Float[Array, "B T H"]:
    """What the experts that each token chose give, weighted and added, and the shared experts.

    Experts that are split over a ``mesh`` run where they lie: every device sees all tokens of its rows, runs its own experts on
    them, and the results are added up.

    Args:
        params: of the layer.
        config: its own.
        x: the states that the experts read.
        mesh: where ``params`` live.
        routed: the states by which experts are chosen; None: ``x``.
    """
    moe = config.moe
    assert moe is not None
    routing = {name: params[name] for name in _ROUTING if name in params}
    experts = {name.removeprefix("experts_"): value for name, value in params.items() if name.startswith("experts_")}
    run = partial(_route_and_run, config) if mesh is None else partial(_run_split, mesh, config)
    y = run(x, x if routed is None else routed, routing, experts).astype(x.dtype)
    if not moe.shared_experts:
        return y
    shared = mlp(params, x, "shared_", config.activation)
    return y + (jax.nn.sigmoid(linear(params, "shared_scale", x)) * shared if moe.shared_gated else shared)


@shape_checked
def route(params: Params, config: ModelConfig, x: Float[Array, "n H"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """The k experts of each token, and their weights. In float32: near a tie, rounding would send a token elsewhere.

    With sigmoid scores, groups and a bias for the choice alone this is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2),
    otherwise the usual top-k of a softmax (Qwen3, arXiv 2505.09388).
    """
    moe = config.moe
    assert moe is not None
    if moe.beside_mlp:  # Gemma 4's router norms what it reads
        scale = params["router_scale"].astype(jnp.float32) * x.shape[-1] ** -0.5
        x = rms_norm(x.astype(jnp.float32), scale, config.norm_eps)
    highest = jax.lax.Precision.HIGHEST  # "float32" on an accelerator is less by default
    logits = jnp.matmul(x.astype(jnp.float32), params["router"].astype(jnp.float32), precision=highest)
    if moe.biased:
        logits = logits + params["router_bias"].astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    preference = scores + params["correction"] if moe.corrected else scores
    if moe.groups > 1:
        preference = jnp.where(_in_kept_groups(moe, preference), preference, -jnp.inf)
    _, chosen = jax.lax.top_k(preference, moe.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)  # sigmoids may all be 0
    if moe.beside_mlp:
        weights = weights * params["expert_scale"].astype(jnp.float32)[chosen]
    return chosen, weights * moe.scale


def _in_kept_groups(moe: MoE, preference: jax.Array) -> jax.Array:
    """``[n, E]`` bool: whether an expert is in one of the token's best groups. A group counts as its two best experts."""
    grouped = preference.reshape(-1, moe.groups, moe.num_experts // moe.groups)
    of_group = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    _, kept = jax.lax.top_k(of_group, moe.groups_kept)
    is_kept = jax.nn.one_hot(kept, moe.groups, dtype=bool).any(axis=-2)
    return jnp.repeat(is_kept, grouped.shape[-1], axis=-1)


_ROUTING = ("router", "router_bias", "router_scale", "expert_scale", "correction")
"""The parameters by which experts are chosen and weighted."""


def _route_and_run(
    config: ModelConfig, x: jax.Array, routed: jax.Array, routing: Params, experts: Params, first: Any = 0
) -> jax.Array:
    """``[B, T, H]`` float32, what those of each token's experts give that are here; the one here at 0 is number ``first``."""
    flat = x.reshape(-1, x.shape[-1])
    chosen, weights = route(routing, config, routed.reshape(flat.shape))
    return _run(config, flat, chosen - first, weights, experts).reshape(x.shape)


def _run(config: ModelConfig, x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Params) -> Float[Array, "n H"]:
    """The weighted sum over each token's experts, in float32. Numbers in ``chosen`` of no expert here are left out.

    One expert after the other runs on all tokens, and a token takes what is its own. That is more arithmetic than sorting the
    tokens by expert, but the time of a pass over a few tokens goes into reading the experts' weights, and this reads each
    expert's once. On a CPU (64 experts of 1024 x 384, 8 for a token, 1 to 256 tokens) `jax.lax.ragged_dot` over sorted tokens,
    which XLA makes there out of masked products with all experts, takes 5 to 10 times as long, and gathering each token's
    experts 20 times.

    Args:
        config: the layer's own.
        x: ``[n, H]``.
        chosen: ``[n, k]`` numbers of experts.
        weights: ``[n, k]`` float32.
        experts: of all experts here, ``gate`` and ``up [E, H, I]``, ``down [E, I, H]``, and their biases, if they have any.
    """
    count = experts["gate"].shape[0]
    chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)  # `count` is dropped below
    shares = jnp.zeros((count, len(x)), jnp.float32)
    shares = shares.at[chosen, jnp.arange(len(x))[:, None]].add(weights, mode="drop")

    @jax.checkpoint  # in training, what an expert made of all tokens is made again instead of kept
    def expert(share: jax.Array, one: Params) -> jax.Array:
        # A token that is not this expert's may be far from what it was trained on, and overflow: the expert reads 0 for it.
        own = jnp.where(share[:, None] != 0, x, 0)
        gated = _gated(config, linear(one, "gate", own), linear(one, "up", own))
        return share[:, None] * linear(one, "down", gated).astype(jnp.float32)

    def every(total: jax.Array, one: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
        return total + expert(*one), None

    def where_chosen(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        def add(total: jax.Array) -> jax.Array:
            return total + expert(shares[index], jax.tree.map(lambda each: each[index], experts))

        return jax.lax.cond(is_chosen[index], add, lambda total: total, total), None

    total = jnp.zeros(x.shape, jnp.float32)
    if chosen.size >= count:  # nearly every expert is chosen by some token
        total, _ = jax.lax.scan(every, total, (shares, experts))
    else:
        is_chosen = jnp.zeros(count, bool).at[chosen.reshape(-1)].set(True, mode="drop")
        total, _ = jax.lax.scan(where_chosen, total, jnp.argsort(~is_chosen, stable=True)[: chosen.size])
    return total


def _gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What an expert's down projection reads. gpt-oss's unit (openai/gpt-oss, model card, section 2.1) cuts both inputs at its
    limit, passes a share ``sigmoid(1.702 gate)`` of the gate, and adds 1 to the other."""
    assert config.moe is not None
    if (limit := config.moe.limit) is None:
        return activate(gate, config.activation) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _run_split(mesh: Mesh, config: ModelConfig, x: jax.Array, routed: jax.Array, routing: Params, experts: Params) -> jax.Array:
    """`_route_and_run` where rows of the batch and experts are split over ``mesh``. No weight leaves its device."""
    units = {**config.axis_units, "batch": x.shape[0]}
    rows = sharding.partition(mesh, ("batch", None, None), units)
    split = sharding.partition(mesh, ("experts",), units)
    axis = split[0]

    def local(x: jax.Array, routed: jax.Array, routing: Params, held: Params) -> jax.Array:
        if axis is None:
            return _route_and_run(config, x, routed, routing, held)
        first = jax.lax.axis_index(axis) * held["gate"].shape[0]
        return jax.lax.psum(_route_and_run(config, x, routed, routing, held, first), axis)

    # Unchecked: that the sum is alike along its axis would have to be said at every scan.
    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, PartitionSpec(), split), out_specs=rows, check_vma=False)
    return run(x, routed, routing, experts)
