"""The options that the commands which measure a pair on prompts have in common."""

from dataclasses import dataclass

from specjax import pipeline, text
from specjax.cli.plan.options import check_batch, check_longest, check_plot
from specjax.decoding.options import GenerationOptions
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.sampling import Rule


@dataclass(frozen=True)
class OnPrompts:
    """Options: a target with a drafter, prompts, and how tokens are sampled.

    Attributes:
        target: the model to generate from, a directory or hub id; "embedded" is the small model
            that comes with specjax.
        drafter: the drafter, as in generate.
        prompts: file with one prompt per line (plain text, or JSON with "prompt" or "text").
        batch: numbers of rows that are decoded together; the output has a line or a table for each.
        longest: maximum chain length to consider, in tokens.
        temperature: sampling temperature; 0 is greedy.
        rule: how tokens are sampled and drafts verified, as in generate; "block" and "rejection"
            compare only chains.
        plot: picture to write: .png, .pdf or .svg.
    """

    target: str = ""
    drafter: str = ""
    prompts: str = ""
    batch: tuple[int, ...] = (1, 4, 16, 64)
    longest: int = 8
    temperature: float = 0.0
    rule: Rule | None = None
    plot: str = ""

    @property
    def title(self) -> str:
        """The title of tables and pictures."""
        return f"{self.target}, drafter {self.drafter}; temperature {self.temperature:g}"

    def load(self, command: str) -> tuple[pipeline.TextGenerator, list[str], GenerationOptions]:
        """Return the pair, the prompts and the options, after checking them.

        Invalid options are refused before any weights are read.
        """
        check_batch(self.batch)
        check_longest(self.longest)
        check_plot(self.plot)
        if not (self.target and self.drafter and self.prompts):
            raise InputError(f"{command}: give --target, --drafter and --prompts FILE")
        prompts = text.read_prompts("prompts", self.prompts)
        options = pipeline.settings(temperature=self.temperature, rule=self.rule)
        options.sampling.rows(1)
        pair = pipeline.load(
            self.target, self.drafter, draft=Chain(self.longest), generation_config=None
        )
        return pair, prompts, options
