"""Tokens a step of token recycling, with empty tables and with those of earlier answers.

python -m benchmarks.recycled_answers

The embedded model continues twelve beginnings of code, one after the other, as texts of one tenant.
The counts depend on the machine only through rounding.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from rich.console import Console
from rich.table import Table

import specjax
from specjax.drafters.methods.token_recycling import AdjacencyTable
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafts.shapes import DynamicTree
from specjax.models.transformer import Target
from specjax.pipeline import TextGenerator
from specjax.sampling import Sampling

BEGINNINGS = (
    "class Stack:\n    def push(self, item):\n",
    "class Queue:\n    def put(self, item):\n",
    "def read_lines(path):\n",
    "def write_lines(path, lines):\n",
    "class Tree:\n    def __init__(self, left, right):\n",
    "def parse_args(argv):\n",
    "class Reader:\n    def read(self, size=-1):\n",
    "class Writer:\n    def write(self, data):\n",
    "def test_read(self):\n",
    "def test_write(self):\n",
    "class Node:\n    def __init__(self, value):\n",
    "def main():\n    args = ",
)
NEW_TOKENS = 96
CAPACITY = 4096
"""The tokens of earlier answers that are kept: more than all texts together have."""


@struct.dataclass
class WithAnswers(specjax.TokenRecycling):
    """Token recycling whose rows all begin with the first segment of ``answers``."""

    def start(self, target: Target, batch: int, capacity: int) -> AdjacencyTable:
        """Return the tables with the pairs of tokens of the first segment."""
        empty = super().start(target, batch, capacity)
        return self.in_segment(empty, jnp.zeros(batch, jnp.int32))


def tokens_a_step(
    generator: TextGenerator,
    temperature: float,
    keeps_answers: bool,
    beginnings: Sequence[str] = BEGINNINGS,
) -> tuple[float, list[list[int]]]:
    """Return the mean number of tokens a step of all texts, and the texts."""
    texts: list[list[int]] = []
    steps = 0
    for number, beginning in enumerate(beginnings):
        answers = SuffixIndex.of(texts if keeps_answers else [], CAPACITY)
        prompt = np.array([generator.encode(beginning)])
        result = specjax.generate(
            generator.target,
            WithAnswers(draft=DynamicTree(4, 5, 16), answers=answers),
            prompt,
            max_new_tokens=NEW_TOKENS,
            eos_token_ids=(),
            key=jax.random.key(number),
            sampling=Sampling(temperature=temperature),
            rule="coupled",
        )
        width = prompt.shape[1]
        texts.append(np.asarray(result.tokens)[0, width : width + NEW_TOKENS].tolist())
        steps += int(np.sum(np.asarray(result.stats.steps)))
    return NEW_TOKENS * len(texts) / steps, texts


def main() -> None:
    """Print the tokens a step, and check that the texts do not depend on the tables."""
    generator = specjax.load("embedded", generation_config=None)
    table = Table("temperature", "empty tables", "with earlier answers", title="tokens a step")
    for temperature in (0.0, 0.8):
        empty, texts = tokens_a_step(generator, temperature, keeps_answers=False)
        filled, same_texts = tokens_a_step(generator, temperature, keeps_answers=True)
        if texts != same_texts:
            raise RuntimeError("the texts depend on the tables")
        table.add_row(f"{temperature:g}", f"{empty:.2f}", f"{filled:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
