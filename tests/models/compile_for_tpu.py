"""Compiles for a TPU v5e that is not there: a pass of two layers of Llama-3.1-8B, of which it prints the bytes over weights and
cache by tokens a row; and attention at its widest, chunks of a prompt with 8 query heads a key and trees of latent attention,
which must fit the chip's fast memory."""

import json
import math
import os
import re

import libtpu

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_LIBRARY_PATH": libtpu.get_library_path(),
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models import params as declarations
from specjax.models.attention import Filled, attend
from specjax.models.shapes import published
from specjax.models.transformer import Target
from specjax.sharding import make_mesh

BATCH, SLOTS = 16, 8192
config = replace(published("llama-3.1-8b"), num_layers=2)
mesh = make_mesh(1, 1, topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
everywhere = NamedSharding(mesh, PartitionSpec())


def shaped(tree, dtype=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=everywhere), tree)


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main_memory_bytes(text: str) -> int:
    """Bytes that the operations of a compiled program read and write, but for what lies in the chip's fast memory, ``S(1)``."""

    def of(shape: str) -> int:
        parts = re.findall(r"(pred|bf16|[fsu](?:8|16|32))\[([\d,]*)\](\{[^}]*\})?", shape)
        width = {"pred": 1, "bf16": 2} | {f"{kind}{bits}": bits // 8 for kind in "fsu" for bits in (8, 16, 32)}
        return sum(
            width[kind] * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims, at in parts if "S(" not in at
        )

    shapes, total = {}, 0
    nothing_moves = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "slice-done")
    for line in text[text.index("\nENTRY") :].splitlines():
        found = re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line)
        if found:
            name, shapes[found[1]], operation, rest = found.groups()
            if operation not in nothing_moves:
                total += sum(of(shapes.get(operand, "")) for operand in re.findall(r"%[\w.\-]+", rest.split("), ")[0]))
                total += 0 if operation.endswith("-start") else of(shapes[name])  # which lists its source again
    return total


params = shaped(declarations.declare(config), jnp.bfloat16)
target = Target(params, config, mesh)
cache = shaped(jax.eval_shape(lambda: Target(params, config).new_cache(BATCH, SLOTS)))
shares = {}
for count in (1, 5, 60):
    x = jax.ShapeDtypeStruct((BATCH, count, config.hidden_size), jnp.bfloat16, sharding=everywhere)
    lowered = jax.jit(lambda layers, x, cache: target.replace(params=layers).run(x, cache)).lower(
        {"layers": params["layers"]}, x, cache
    )
    shares[count] = main_memory_bytes(lowered.compile().as_text()) / (size(params["layers"]) + size(cache))
for kv_heads, group, sizes, count in ((8, 8, (128,), 512), (1, 128, (512, 64), 60)):
    q = tuple(shaped(jax.ShapeDtypeStruct((1, count, kv_heads * group, d), jnp.bfloat16)) for d in sizes)
    parts = sizes if len(sizes) > 1 else sizes * 2
    entry = tuple(shaped(jax.ShapeDtypeStruct((1, kv_heads, SLOTS, d), jnp.bfloat16)) for d in parts)
    filled = Filled(entry, shaped(jax.ShapeDtypeStruct((1,), jnp.int32)), mesh=mesh)
    jax.jit(lambda q, filled: attend(q, [filled], values_part=2 - len(q))).lower(q, filled).compile()
print(json.dumps(shares))
