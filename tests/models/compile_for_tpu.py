"""Compiles for a TPU v5e that is not there: a pass of two layers of Llama-3.1-8B, of which it prints the bytes over weights and
cache by tokens a row; and attention at its widest, chunks of a prompt with 8 query heads a key and trees of latent attention,
which must fit the chip's fast memory."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax.lowering.abstract import abstract_model, bytes_of_one
from specjax.lowering.hlo import Program
from specjax.lowering.topologies import find_mesh
from specjax.models.attention import Filled, attend
from specjax.models.published import published

BATCH, SLOTS = 16, 8192
config = replace(published("llama-3.1-8b"), num_layers=2)
mesh, _ = find_mesh("v5e:2x4", 1, 1)
everywhere = NamedSharding(mesh, PartitionSpec())


def shaped(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)


target = abstract_model(config, mesh)
params = target.params
cache = shaped(jax.eval_shape(lambda: abstract_model(config, mesh).replace(mesh=None).new_cache(BATCH, SLOTS)))
shares = {}
for count in (1, 5, 60):
    x = jax.ShapeDtypeStruct((BATCH, count, config.hidden_size), jnp.bfloat16, sharding=everywhere)
    lowered = jax.jit(lambda layers, x, cache: target.replace(params=layers).run(x, cache)).lower(
        {"layers": params["layers"]}, x, cache
    )
    program = Program(lowered.compile().as_text())
    moved = program.bytes_moved(tuple(program.computations[program.entry].values()))
    shares[count] = moved / (bytes_of_one(params["layers"]) + bytes_of_one(cache.layers))
PAGE = 256
widest = [(8, 8, (128,), 512, None), (1, 128, (512, 64), 60, None)]
of_pages = [(8, 4, (64,), 5, PAGE), (8, 4, (128,), 1, PAGE), (8, 8, (128,), 512, PAGE), (1, 128, (512, 64), 60, PAGE)]
for kv_heads, group, sizes, count, page in widest + of_pages:
    q = tuple(shaped(jax.ShapeDtypeStruct((1, count, kv_heads * group, d), jnp.bfloat16)) for d in sizes)
    parts = sizes if len(sizes) > 1 else sizes * 2
    pieces, slots = (SLOTS // page, page) if page else (1, SLOTS)
    entry = tuple(shaped(jax.ShapeDtypeStruct((pieces, kv_heads, slots, d), jnp.bfloat16)) for d in parts)
    table = shaped(jax.ShapeDtypeStruct((1, pieces), jnp.int32)) if page else None
    filled = Filled(entry, shaped(jax.ShapeDtypeStruct((1,), jnp.int32)), table=table, mesh=mesh)
    own = tuple(shaped(jax.ShapeDtypeStruct((1, kv_heads, count, d), jnp.bfloat16)) for d in parts)
    mask = shaped(jax.ShapeDtypeStruct((1, count, count), bool))
    jax.jit(lambda q, *pieces: attend(q, pieces, values_part=2 - len(q))).lower(q, filled, (own, mask)).compile()
print(json.dumps(shares))
