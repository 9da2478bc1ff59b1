"""What the commands have in common that measure a pair on prompts."""

from dataclasses import dataclass

from specjax import pipeline, text
from specjax.cli.plan.options import check_batch, check_longest, check_plot
from specjax.decoding.options import GenerationOptions
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.sampling import Rule


@dataclass(frozen=True)
class OnPrompts:
    """A pair, prompts, and the settings of a generation.

    Attributes:
        target: directory or hub id of the model to generate from; "embedded" is the small one that comes with specjax.
        drafter: as in generate.
        prompts: a file with one prompt a line (plain, or JSON with "prompt" or "text").
        batch: rows decoded together; the table has a line for each number given, or there is a table for each.
        longest: longest chain to look at, in tokens.
        temperature: of the generation; 0 is greedy.
        rule: as in generate; "block" and "rejection" compare chains alone.
        plot: a picture to write: .png, .pdf or .svg.
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
        """What is measured."""
        return f"{self.target}, drafter {self.drafter}; temperature {self.temperature:g}"

    def load(self, command: str) -> tuple[pipeline.TextGenerator, list[str], GenerationOptions]:
        """The pair, the prompts, and the settings of the generation; what cannot be used is refused before weights are read."""
        check_batch(self.batch)
        check_longest(self.longest)
        check_plot(self.plot)
        if not (self.target and self.drafter and self.prompts):
            raise InputError(f"{command}: give --target, --drafter and --prompts FILE")
        prompts = text.read_prompts("prompts", self.prompts)
        options = pipeline.settings(temperature=self.temperature, rule=self.rule)
        options.sampling.rows(1)
        pair = pipeline.load(self.target, self.drafter, draft=Chain(self.longest), generation_config=None)
        return pair, prompts, options
