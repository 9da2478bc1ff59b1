"""``specjax evaluate --lossless``: a pair of the user's own, put to the test of whether its text is the target's."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specjax import decoding, pipeline, text
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Drafter
from specjax.errors import InputError
from specjax.evaluation import drawn_texts, losslessness
from specjax.evaluation.conformance import SETTINGS
from specjax.reports import losslessness as report
from specjax.sampling import Sampling


@dataclass(frozen=True)
class LosslessTest:
    """A target, and how its drafters are tested.

    Attributes:
        generator: the target and its tokenizer.
        prompts: what is continued; None: `losslessness.PROMPTS`.
        chat: put them into the model's chat template.
        options: of the texts.
        draws: how many drafts are judged.
    """

    generator: pipeline.TextGenerator
    prompts: list[str] | None
    chat: bool
    options: GenerationOptions
    draws: int

    def run(self, drafters: dict[str, Drafter], settings: dict[str, Any], output: Path | None, as_json: bool) -> int:
        """Test all ``drafters``, print and write what came of it; the exit status: 1 where one is not lossless."""
        console, verdicts = Console(width=160, highlight=False), {}
        for name, drafter in drafters.items():
            with _Waiting(name) as waiting:
                verdicts[name] = self._verdict(drafter, waiting)
            if not as_json:
                console.print(f"[bold]{name}[/]\n{report.line(verdicts[name])}", soft_wrap=True)
                for each in report.details(verdicts[name]):
                    console.print(f"  {each}", soft_wrap=True)
        device = jax.devices()[0].device_kind
        machine = {"device": device, "devices": len(jax.devices()), "jax": jax.__version__}
        content = {"settings": settings, "machine": machine, "results": report.as_json(verdicts)}
        if as_json:
            print(json.dumps(content))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / "lossless.json").write_text(json.dumps(content, indent=2) + "\n")
            (output / "lossless.md").write_text(report.markdown(verdicts, device))
            print(f"written: {output}/lossless.json, lossless.md", file=sys.stderr if as_json else sys.stdout)
        return 0 if all(verdict.lossless for verdict in verdicts.values()) else 1

    def _verdict(self, drafter: Drafter, waiting: "_Waiting") -> losslessness.Verdict:
        sampling = self.options.sampling
        drawn = Sampling(sampling.temperature, top_p=sampling.top_p)
        unset = sampling.temperature == 0 and sampling.top_p == 1
        return losslessness.check(
            self.generator.target,
            drafter,
            *self._tokens(drafter),
            settings=SETTINGS if unset else (drawn if sampling.temperature else Sampling(top_p=sampling.top_p),),
            rule=self.options.rule,
            max_new_tokens=int(self.options.max_new_tokens),
            draws=self.draws,
            key=self.options.key,
            progress=waiting.tell,
        )

    def _tokens(self, drafter: Drafter) -> tuple[np.ndarray, np.ndarray]:
        """The prompts' ids; of one that is too long for the models' positions, the end."""
        positions = decoding.most_positions(self.generator.target, drafter)
        new = max(int(self.options.max_new_tokens), drawn_texts.NEW_TOKENS)
        if positions <= new:
            raise InputError(f"max_new_tokens={self.options.max_new_tokens}: of {positions} positions nothing is left")
        prompts = losslessness.PROMPTS if self.prompts is None else self.prompts
        return text.pad([self.generator.encode(prompt, self.chat)[-(positions - new) :] for prompt in prompts])


_LINE_EVERY = 10.0
"""Seconds between two lines where nobody watches a terminal."""


class _Waiting:
    """Says on standard error how far the test of a drafter is: a bar, or where that is no terminal a line now and then."""

    def __init__(self, name: str) -> None:
        self._name, self._console = name, Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._tasks: dict[str, Any] = {}
        self._started = self._said = time.monotonic()

    def __enter__(self) -> "_Waiting":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done. One that has but a single piece shows that it goes on."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total if total > 1 else None)
        self._bar.update(self._tasks[stage], completed=done, total=total if total > 1 or done else None)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said > _LINE_EVERY:
            self._said = now
            print(f"{self._name}: {stage} {done}/{total}, {now - self._started:.0f} s", file=sys.stderr, flush=True)
