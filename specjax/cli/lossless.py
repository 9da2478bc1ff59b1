"""The test of ``specjax evaluate --lossless``: whether text with a drafter is the target's own."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specjax import decoding, pipeline, text
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Drafter
from specjax.errors import InputError
from specjax.evaluation import drawn_texts, losslessness
from specjax.evaluation.conformance import SETTINGS
from specjax.files import replacing
from specjax.progress import waiting
from specjax.reports import losslessness as report
from specjax.sampling import Sampling


@dataclass(frozen=True)
class LosslessTest:
    """A target, and how its drafters are tested.

    Attributes:
        generator: the target and its tokenizer.
        prompts: the prompts to continue; None: `losslessness.PROMPTS`.
        chat: whether the prompts are put into the model's chat template.
        options: the options of the generation.
        draws: the number of tokens that are sampled to test the distribution.
    """

    generator: pipeline.TextGenerator
    prompts: list[str] | None
    chat: bool
    options: GenerationOptions
    draws: int

    def run(
        self,
        drafters: dict[str, Drafter],
        about: dict[str, Any],
        output: Path | None,
        as_json: bool,
    ) -> int:
        """Test all drafters, print and write the results, and return the exit status.

        The status is 1 if a drafter is not lossless. ``about`` has the settings and the machine,
        which are written with the results.
        """
        console, verdicts = Console(width=160, highlight=False), {}
        for name, drafter in drafters.items():
            with waiting(f"testing {name}"):
                verdicts[name] = self._verdict(drafter)
            if not as_json:
                console.print(name, style="bold", markup=False, soft_wrap=True)
                for line in (
                    report.line(verdicts[name]),
                    *(f"  {detail}" for detail in report.details(verdicts[name])),
                ):
                    console.print(line, markup=False, soft_wrap=True)
        content = {**about, "results": report.as_json(verdicts)}
        if as_json:
            print(json.dumps(content))
        if output is not None:
            with replacing(output) as scratch:
                (scratch / "lossless.json").write_text(json.dumps(content, indent=2) + "\n")
                (scratch / "lossless.md").write_text(
                    report.markdown(verdicts, about["machine"]["device"])
                )
            print(
                f"written: {output}/lossless.json, lossless.md",
                file=sys.stderr if as_json else sys.stdout,
            )
        return 0 if all(verdict.lossless for verdict in verdicts.values()) else 1

    def _verdict(self, drafter: Drafter) -> losslessness.LosslessnessVerdict:
        sampling = self.options.sampling
        unset = sampling == Sampling(temperature=0.0)
        sampled = sampling if sampling.temperature else replace(sampling, temperature=1.0)
        return losslessness.check(
            self.generator.target,
            drafter,
            *self._tokens(drafter),
            settings=SETTINGS if unset else (sampled,),
            rule=self.options.rule,
            max_new_tokens=int(self.options.max_new_tokens),
            draws=self.draws,
            key=self.options.key,
        )

    def _tokens(self, drafter: Drafter) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompts' token ids, cut at the front to fit the models' positions."""
        positions = decoding.most_positions(self.generator.target, drafter)
        new = max(int(self.options.max_new_tokens), drawn_texts.NEW_TOKENS)
        if positions <= new:
            raise InputError(
                f"max_new_tokens={self.options.max_new_tokens}: the models have only {positions}"
                " positions"
            )
        prompts = losslessness.PROMPTS if self.prompts is None else self.prompts
        return text.pad(
            [self.generator.encode(prompt, self.chat)[-(positions - new) :] for prompt in prompts]
        )
