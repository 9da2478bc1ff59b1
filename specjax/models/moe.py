"""Sparse mixture of experts, dropless: every token goes to all of its experts.

Many implementations give an expert a capacity, and drop tokens beyond it. The output for a token
would then depend on the rest of the batch and on drafted tokens: the target would not be one
distribution, and speculative decoding not lossless. Here the tokens of a call are independent.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax import sharding
from specjax.models.config import ModelConfig, MoE
from specjax.models.params import Params
from specjax.models.primitives import activate, gated_unit, linear, mlp, rms_norm
from specjax.models.sorted_experts import run_sorted
from specjax.shape_checks import shape_checked


def mixture(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T H"],
    mesh: Mesh | None = None,
    routed: Float[Array, "B T H"] | None = None,
) -> Float[Array, "B T H"]:
    """Return the weighted sum of each token's experts, plus the shared experts.

    Experts that are sharded over a ``mesh`` run on their devices: every device sees all tokens of
    its rows, runs its own experts on them, and the results are summed.

    Args:
        params: the parameters of the layer.
        config: the configuration of the layer.
        x: the hidden states that the experts read.
        mesh: the mesh of ``params``.
        routed: the hidden states that the router reads; None for ``x``.
    """
    moe = config.moe
    assert moe is not None
    routing = {name: params[name] for name in _ROUTING if name in params}
    experts = {
        name.removeprefix("experts_"): value
        for name, value in params.items()
        if name.startswith("experts_")
    }
    run = partial(_route_and_run, config) if mesh is None else partial(_run_split, mesh, config)
    inputs = linear(params, "latent_in", x) if moe.latent_size else x
    y = run(inputs, x if routed is None else routed, routing, experts).astype(x.dtype)
    if moe.latent_size:
        y = linear(params, "latent_out", y)
    if not moe.shared_experts:
        return y
    shared = mlp(params, x, "shared_", config.activation, limit=config.mlp_limit)
    return y + (
        jax.nn.sigmoid(linear(params, "shared_scale", x)) * shared if moe.shared_gated else shared
    )


@shape_checked
def route(
    params: Params, config: ModelConfig, x: Float[Array, "n H"]
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Return the k experts of each token, and their weights.

    It is in float32: near a tie, rounding would send a token to another expert. With sigmoid
    scores, groups and a bias for the selection alone this is DeepSeek-V3's router (arXiv
    2412.19437, section 2.1.2), otherwise the usual top-k of a softmax (Qwen3, arXiv 2505.09388).
    """
    moe = config.moe
    assert moe is not None
    if moe.beside_mlp:  # Gemma 4's router norms what it reads
        scale = params["router_scale"].astype(jnp.float32) * x.shape[-1] ** -0.5
        x = rms_norm(x.astype(jnp.float32), scale, config.norm_eps)
    highest = jax.lax.Precision.HIGHEST  # "float32" on an accelerator is less by default
    logits = jnp.matmul(
        x.astype(jnp.float32), params["router"].astype(jnp.float32), precision=highest
    )
    if moe.biased:
        logits = logits + params["router_bias"].astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    preference = scores + params["correction"] if moe.corrected else scores
    if moe.scales_inputs:  # as transformers' Llama 4 selects: sigmoids of large logits are equal
        preference = logits
    if moe.groups > 1:
        preference = jnp.where(_in_kept_groups(moe, preference), preference, -jnp.inf)
    _, chosen = jax.lax.top_k(preference, moe.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + moe.added_to_sum)
    if moe.beside_mlp:
        weights = weights * params["expert_scale"].astype(jnp.float32)[chosen]
    return chosen, weights * moe.scale


def _in_kept_groups(moe: MoE, preference: jax.Array) -> jax.Array:
    """Return ``[n, E]`` bool: whether an expert is in one of the token's best groups.

    The score of a group is the sum of its two best experts' scores.
    """
    grouped = preference.reshape(-1, moe.groups, moe.num_experts // moe.groups)
    group_scores = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    _, best_groups = jax.lax.top_k(group_scores, moe.groups_kept)
    is_kept = jax.nn.one_hot(best_groups, moe.groups, dtype=bool).any(axis=-2)
    return jnp.repeat(is_kept, grouped.shape[-1], axis=-1)


_ROUTING = ("router", "router_bias", "router_scale", "expert_scale", "correction")
"""The parameters of the router."""


def _route_and_run(
    config: ModelConfig,
    x: jax.Array,
    routed: jax.Array,
    routing: Params,
    experts: Params,
    first: Any = 0,
) -> jax.Array:
    """Return the outputs ``[B, T, H]`` float32 of each token's experts that are on this device.

    ``first`` is the index of the first expert on this device.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen, weights = route(routing, config, routed.reshape(len(flat), -1))
    assert config.moe is not None
    if config.moe.scales_inputs:
        flat, weights = flat * weights.astype(flat.dtype), jnp.ones_like(weights)
    return _run(config, flat, chosen - first, weights, experts).reshape(x.shape)


def _run(
    config: ModelConfig, x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Params
) -> Float[Array, "n H"]:
    """Return the weighted sum over each token's experts, in float32.

    Indices in ``chosen`` of experts that are not here are ignored.

    Many tokens are sorted by expert (`specjax.models.sorted_experts`). With few, one expert after
    the other runs on all tokens, and its output is weighted with 0 for other experts' tokens. That
    is more arithmetic. But a pass over a few tokens spends its time reading the experts' weights,
    and this reads each expert once. On a CPU (64 experts of 1024 x 384, 8 for a token, 1 to 256
    tokens) `jax.lax.ragged_dot` over sorted tokens, which XLA implements there as masked products
    with all experts, takes 5 to 10 times as long, and gathering each token's experts 20 times.

    Args:
        config: the configuration of the layer.
        x: ``[n, H]`` the hidden states.
        chosen: ``[n, k]`` indices of experts.
        weights: ``[n, k]`` float32.
        experts: the parameters of all experts here, ``gate`` and ``up [E, H, I]``,
            ``down [E, I, H]``, and their biases, if they have any. Some models have no gate.
    """
    count = experts["up"].shape[0]
    if _sorts(config, len(x)):
        assert config.moe is not None
        mean = len(x) * config.moe.experts_per_token / config.moe.num_experts
        unit, inner = partial(_unit, config), partial(_inner, config)
        return run_sorted(unit, inner, x, chosen, weights, experts, mean)
    # Index `count` is dropped below.
    chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)
    shares = jnp.zeros((count, len(x)), jnp.float32)
    shares = shares.at[chosen, jnp.arange(len(x))[:, None]].add(weights, mode="drop")

    @jax.checkpoint  # in training the backward pass computes an expert's activations again
    def expert(share: jax.Array, params: Params) -> jax.Array:
        # The tokens of other experts are zeroed: they may be far from this expert's training data
        # and overflow, and 0 times infinity is NaN.
        routed = jnp.where(share[:, None] != 0, x, 0)
        inner = _inner(config, lambda name: linear(params, name, routed))
        return share[:, None] * linear(params, "down", inner).astype(jnp.float32)

    def every(total: jax.Array, arguments: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
        return total + expert(*arguments), None

    def where_chosen(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        def add(total: jax.Array) -> jax.Array:
            return total + expert(shares[index], jax.tree.map(lambda stack: stack[index], experts))

        return jax.lax.cond(is_chosen[index], add, lambda total: total, total), None

    total = jnp.zeros(x.shape, jnp.float32)
    if chosen.size >= count:  # nearly every expert has a token, so a condition would not pay
        total, _ = jax.lax.scan(every, total, (shares, experts))
    else:
        is_chosen = jnp.zeros(count, bool).at[chosen.reshape(-1)].set(True, mode="drop")
        # The chosen experts come first. At most `chosen.size` are chosen, a static bound.
        total, _ = jax.lax.scan(
            where_chosen, total, jnp.argsort(~is_chosen, stable=True)[: chosen.size]
        )
    return total


LEAST_SORTED = 128
"""The number of tokens from which on they are sorted by expert."""


def _sorts(config: ModelConfig, tokens: int) -> bool:
    """Return whether tokens are sorted by expert. It depends on shapes alone.

    docs/results/cpu.md has the times of both forms.
    """
    moe = config.moe
    assert moe is not None
    return tokens >= LEAST_SORTED and moe.num_experts >= 4 * moe.experts_per_token


def _unit(config: ModelConfig, params: Params, rows: jax.Array, counts: jax.Array) -> jax.Array:
    """Run one expert on the rows that count. See `specjax.models.sorted_experts`."""
    inner = _inner(config, lambda name: linear(params, name, rows))
    # With biases it is not 0 for rows of zeros, which a calibration would take for inputs.
    return linear(params, "down", jnp.where(counts[:, None], inner, 0))


def _inner(config: ModelConfig, product: Callable[[str], jax.Array]) -> jax.Array:
    """Return the input of an expert's down projection.

    ``product`` returns the product of the expert's input with the matrix of a name.
    """
    if not config.gated_mlp:
        return activate(product("up"), config.activation)
    return _gated(config, product("gate"), product("up"))


def _gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the input of the down projection of an expert with a gate.

    gpt-oss's unit (openai/gpt-oss, model card, section 2.1) clamps both inputs at its limit,
    multiplies the gate with ``sigmoid(1.702 gate)``, and adds 1 to the other input.
    """
    assert config.moe is not None
    if (limit := config.moe.limit) is None:
        return gated_unit(gate, up, config.activation, config.experts_limit)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _run_split(
    mesh: Mesh,
    config: ModelConfig,
    x: jax.Array,
    routed: jax.Array,
    routing: Params,
    experts: Params,
) -> jax.Array:
    """Run `_route_and_run` with rows and experts sharded over ``mesh``.

    No weight leaves its device.
    """
    units = {**config.axis_units, "batch": x.shape[0]}
    rows = sharding.partition(mesh, ("batch", None, None), units)
    split = sharding.partition(mesh, ("experts",), units)
    axis = split[0]

    def local(x: jax.Array, routed: jax.Array, routing: Params, local_experts: Params) -> jax.Array:
        if axis is None:
            return _route_and_run(config, x, routed, routing, local_experts)
        first = jax.lax.axis_index(axis) * local_experts["up"].shape[0]
        return jax.lax.psum(_route_and_run(config, x, routed, routing, local_experts, first), axis)

    # Unchecked: the check would need an annotation at every scan that the sum is replicated.
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, PartitionSpec(), split),
        out_specs=rows,
        check_vma=False,
    )
    return run(x, routed, routing, experts)
