"""Compile a step of decoding for an accelerator that is not there, and print its cost as JSON.

    python compile_in_pages.py TOPOLOGY MESH MODEL DRAFTER CONTEXT PAGE

The step is compiled with contiguous caches, and with caches in pages. A few layers of a model are
enough, because all are alike.
"""

import json
import sys
from dataclasses import replace

from specjax.drafts.names import parse_shape
from specjax.lowering import abstract
from specjax.lowering.compiled import Setup, compile_step
from specjax.lowering.topologies import find_mesh
from specjax.models.published import published

LAYERS, BATCH = 4, 8

topology, shape, model, drafter, context, page = sys.argv[1:]
mesh, chip = find_mesh(topology, *map(int, shape.split("x")))
target = abstract.abstract_model(replace(published(model), num_layers=LAYERS), mesh)
draft = None if drafter == "none" else parse_shape("dynamic:10,4,32")
model = abstract.abstract_drafter(drafter, draft, target)
costs = {}
for name, size in (("contiguous", None), ("pages", int(page))):
    decode = compile_step(
        Setup(target, mesh, chip, BATCH, int(context), page=size), model, drafter
    ).decode
    costs[name] = {
        "copies": decode.cache_copies,
        "bytes": decode.bytes,
        "cycles": decode.cycles,
        "exchanges": decode.collectives,
    }
print(json.dumps(costs))
