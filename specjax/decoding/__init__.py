"""Decoding: the state of a batch, the loop, generation, verification, and what is counted."""

from specjax.decoding.generation import Result, generate, most_positions, start, stream
from specjax.decoding.loop import advance, decode, propose_step, rows_of_pass, step
from specjax.decoding.options import GenerationOptions
from specjax.decoding.state import DecodeState, insert, prefill

__all__ = [
    "DecodeState",
    "GenerationOptions",
    "Result",
    "advance",
    "decode",
    "generate",
    "insert",
    "most_positions",
    "prefill",
    "propose_step",
    "rows_of_pass",
    "start",
    "step",
    "stream",
]
