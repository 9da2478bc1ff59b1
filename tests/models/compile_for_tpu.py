"""Compile programs for a TPU v5e that is not there, and print the bytes that some of them move.

The first programs are passes of two layers of Llama-3.1-8B over 1, 5 and 60 tokens a row. For each
number of tokens the script prints, in JSON, the bytes that a pass moves divided by those of its
weights and its cache.

The other programs are attention at its widest, all with sinks and a cap. They must fit the chip's
fast memory: chunks of a prompt with 8 query heads a key, trees of latent attention, and few queries
of heads of 512.
"""

import itertools
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specjax.lowering.abstract import abstract_model, bytes_of_one
from specjax.lowering.hlo import HloProgram
from specjax.lowering.topologies import find_mesh
from specjax.models.attention import Filled, attend
from specjax.models.published import published
from specjax.models.quantized_cache import quantize

BATCH, SLOTS = 16, 8192
config = replace(published("llama-3.1-8b"), num_layers=2)
mesh, _ = find_mesh("v5e:2x4", 1, 1)
replicated = NamedSharding(mesh, PartitionSpec())


def shaped(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)


target = abstract_model(config, mesh)
params = target.params
cache = shaped(
    jax.eval_shape(lambda: abstract_model(config, mesh).replace(mesh=None).new_cache(BATCH, SLOTS))
)
shares = {}
for count in (1, 5, 60):
    x = jax.ShapeDtypeStruct((BATCH, count, config.hidden_size), jnp.bfloat16, sharding=replicated)
    lowered = jax.jit(lambda layers, x, cache: target.replace(params=layers).run(x, cache)).lower(
        {"layers": params["layers"]}, x, cache
    )
    program = HloProgram(lowered.compile().as_text())
    moved = program.bytes_moved(tuple(program.computations[program.entry].values()))
    shares[count] = moved / (bytes_of_one(params["layers"]) + bytes_of_one(cache.layers))
PAGE = 256
widest = [(8, 8, (128,), 512, None), (1, 128, (512, 64), 60, None)]
widest += [
    (8, 8, (64,), 512, None),
    (4, 8, (512,), 512, None),
    (4, 8, (512,), 16, None),
    (8, 7, (128,), 100, None),
]
paged = [
    (8, 4, (64,), 5, PAGE),
    (8, 4, (128,), 1, PAGE),
    (8, 8, (128,), 512, PAGE),
    (1, 128, (512, 64), 60, PAGE),
]
paged += [(4, 8, (512,), 16, PAGE)]


def part(shape, dtype):
    floats = jax.ShapeDtypeStruct(shape, jnp.bfloat16 if dtype == jnp.int8 else dtype)
    return shaped(jax.eval_shape(quantize, floats) if dtype == jnp.int8 else floats)


for (kv_heads, group, sizes, count, page), stored_dtype in itertools.product(
    widest + paged, (jnp.bfloat16, jnp.float32, jnp.int8)
):
    # In float32 only heads of 512 are compiled: their blocks are narrower, so that they fit.
    if stored_dtype == jnp.float32 and sizes != (512,):
        continue
    dtype = jnp.bfloat16 if stored_dtype == jnp.int8 else stored_dtype
    q = tuple(shaped(jax.ShapeDtypeStruct((1, count, kv_heads * group, d), dtype)) for d in sizes)
    parts = sizes if len(sizes) > 1 else sizes * 2
    pieces, slots = (SLOTS // page, page) if page else (1, SLOTS)
    entry = tuple(part((pieces, kv_heads, slots, d), stored_dtype) for d in parts)
    table = shaped(jax.ShapeDtypeStruct((1, pieces), jnp.int32)) if page else None
    filled = Filled(entry, shaped(jax.ShapeDtypeStruct((1,), jnp.int32)), table=table, mesh=mesh)
    new = tuple(part((1, kv_heads, count, d), stored_dtype) for d in parts)
    mask = shaped(jax.ShapeDtypeStruct((1, count, count), bool))
    # Attention with sinks takes more memory than without.
    sinks = shaped(jax.ShapeDtypeStruct((kv_heads * group,), dtype))
    run = partial(attend, values_part=2 - len(q), cap=50.0)
    jax.jit(lambda q, sinks, *pieces, run=run: run(q, pieces, sinks=sinks)).lower(
        q, sinks, filled, (new, mask)
    ).compile()
print(json.dumps(shares))
