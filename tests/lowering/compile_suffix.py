"""Compile a step with drafts from earlier text for an accelerator that is not there.

    python compile_suffix.py TOPOLOGY DRAFT TOKENS

The target is Llama-3.1-8B with few layers, because all are alike, and 8 rows with 1,024 tokens. The
index has room for so many tokens. It prints as JSON: the copies of its arrays in main memory, the
bytes of a step that are moved from it into fast memory, the turns and the gathers of the loop that
searches it, the bytes of both together, and those that a plain step of all layers must read.
"""

import json
import sys
from dataclasses import replace
from functools import partial

import jax

from specjax.drafters import Suffix
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafts.names import parse_shape
from specjax.lowering import abstract, hlo
from specjax.lowering.compiled import Setup, compile_step
from specjax.lowering.topologies import find_mesh
from specjax.models.published import published

LAYERS, BATCH, CONTEXT, NEW = 2, 8, 1024, 256

topology, draft, tokens = sys.argv[1:]
count = int(tokens)
mesh, chip = find_mesh(topology, 1, 1)
config = published("llama-3.1-8b")
target = abstract.abstract_model(replace(config, num_layers=LAYERS), mesh)
index = jax.tree.map(
    partial(abstract.everywhere, mesh),
    jax.eval_shape(lambda: SuffixIndex.empty(segments=1, capacity=count)),
)
drafter = Suffix(index, draft=parse_shape(draft))
step = compile_step(Setup(target, mesh, chip, BATCH, CONTEXT, NEW), drafter, "suffix").decode
program = hlo.HloProgram(step.text)
turns = program.turns(program.main_loop, lambda _: 1)
# What is inside a fusion is not in memory. Nothing else in a step has as many whole numbers.
fused_names = {
    name
    for operations in program.computations.values()
    for operation in operations.values()
    if operation.kind == "fusion"
    for name in operation.computations("calls")
}
copies = [
    f"{operation.kind} {operation.shape}"
    for name in program.computations.keys() - fused_names
    for operation, _, bytes_written in program.moved(list(program.computations[name].values()))
    if "s32[" in operation.shape and bytes_written >= 4 * count
]
# A TPU's compiler may move the index into fast memory in each step.
prefetched = sum(
    turn.turns * bytes_read
    for turn in turns
    for operation, bytes_read, _ in program.moved(turn.operations)
    if f"s32[{count + 1}]" in operation.shape
)
# The loop of the binary search, and the operations inside its fusions.
(search,) = [turn for turn in turns if turn.turns == (count + 1).bit_length()]
fused = [
    operation
    for fusion in search.operations
    for name in fusion.computations("calls")
    for operation in program.computations[name].values()
]
whole = abstract.abstract_model(config, mesh)
cache = jax.eval_shape(lambda: whole.new_cache(BATCH, CONTEXT + NEW).layers)
cache = jax.tree.map(partial(abstract.everywhere, mesh), cache)
costs = {
    "copies": copies,
    "prefetched": prefetched,
    "turns": search.turns,
    "gathers": sum(operation.kind == "gather" for operation in (*search.operations, *fused)),
    "bytes": prefetched + search.turns * program.bytes_moved(search.operations),
    "plain": abstract.bytes_of_pass(whole, cache),
}
print(json.dumps(costs))
