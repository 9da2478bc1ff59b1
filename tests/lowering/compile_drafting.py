"""Compile the drafting of a step for an accelerator that is not there, and print its cost as JSON.

    python compile_drafting.py TOPOLOGY DRAFTER DEPTH...

The drafters have their published sizes, for Qwen3-8B. There is one row with 1,024 tokens of
context.
"""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters import DFlash, DFlash2, DSpark, PEagle
from specjax.drafts.shapes import Chain
from specjax.lowering import abstract
from specjax.lowering.compiled import compile_program
from specjax.lowering.topologies import find_mesh
from specjax.models.published import published
from specjax.sampling import Sampling

CONTEXT, CAPACITY = 1024, 1280
SIZES = {"num_layers": 5}
# The class of each drafter, and its options for drafts of a depth. A block that is not causal is as
# long as in training, so drafts of another depth need another drafter. P-EAGLE's first token comes
# from an earlier pass.
DRAFTERS: dict[str, tuple[type, Any]] = {
    "dflash": (DFlash, lambda depth: {**SIZES, "block_size": depth + 1}),
    "jetspec": (DFlash, lambda depth: {**SIZES, "block_size": 17, "variant": {"causal": True}}),
    "dspark": (DSpark, lambda depth: {**SIZES, "block_size": depth}),
    "dflash2": (DFlash2, lambda depth: {**SIZES, "block_size": depth + 1}),
    "peagle": (PEagle, lambda depth: {"num_layers": 4}),
}

topology, name, *depths = sys.argv[1:]
mesh, chip = find_mesh(topology, 1, 1)
target = abstract.abstract_model(published("qwen3-8b"), mesh)
kind, options = DRAFTERS[name]
costs = {}
for depth in map(int, depths):
    make = partial(kind.init, key=jax.random.key(0), draft=Chain(depth), **options(depth))
    drafter = abstract.place_model(jax.eval_shape(make, target.replace(mesh=None)), mesh)
    row = partial(abstract.rows, mesh, 1)

    def placed(tree: Any, row: Any = row) -> Any:
        return jax.tree.map(lambda leaf: row(leaf.shape, leaf.dtype), tree)

    state = placed(jax.eval_shape(lambda drafter=drafter: drafter.start(target, 1, CAPACITY)))
    keys = placed(jax.eval_shape(partial(jax.random.split, num=(depth, 1)), jax.random.key(0)))
    sampling = placed(Sampling(temperature=0.0).rows(1))
    root, active = row((1,), jnp.int32), row((1,), bool)
    lowered = jax.jit(kind.propose).lower(drafter, target, state, root, sampling, keys, active)
    compiled, _ = compile_program(
        f"{name}, {depth} deep", lowered, mesh, turns=lambda _, depth=depth: max(1, depth - 1)
    )
    seconds = {
        "memory": compiled.bytes / chip.bandwidth,
        "cycles": compiled.cycles / chip.clock if compiled.cycles else 0.0,
    }
    costs[depth] = {
        "bytes": compiled.bytes,
        "cycles": compiled.cycles,
        "kernels": compiled.kernels,
        "seconds": seconds,
    }
print(json.dumps(costs))
