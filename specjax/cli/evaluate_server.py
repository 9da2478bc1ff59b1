"""The measurement of a running server, for ``specjax evaluate --server``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specjax.cli.evaluation_results import EvaluationResults, golden_notes
from specjax.evaluation.protocols import AcceptanceProtocol, differences
from specjax.evaluation.questions import Question
from specjax.evaluation.served import MeasuredServer, ask, total_growth
from specjax.progress import track
from specjax.reports import evaluation as report
from specjax.reports.golden import Thinking, golden_yaml


@dataclass(frozen=True)
class ServerMeasurement:
    """The settings of a measurement of a server.

    Attributes:
        model: the server's model.
        questions: the questions.
        protocol: the protocol; None: none.
        max_new_tokens: the maximum number of tokens of an answer.
        sampling: the temperature, and the limits of the distribution that are in use, by name.
        seed: the random seed of the requests.
        thinking: whether the model thinks before it answers; None: as its template does.
        variables: the variables for the server's chat template.
        settings: the options of the command, for the report.
    """

    model: MeasuredServer
    questions: Sequence[Question]
    protocol: AcceptanceProtocol | None
    max_new_tokens: int
    sampling: dict[str, float]
    seed: int
    thinking: Thinking | None
    variables: dict[str, Any]
    settings: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """Return the fields of the requests beside the model and the messages."""
        fields: dict[str, Any] = {"max_tokens": self.max_new_tokens, **self.sampling}
        if self.sampling["temperature"]:
            fields["seed"] = self.seed
        switch = {} if self.thinking is None else {"enable_thinking": self.thinking == "on"}
        if variables := {**switch, **self.variables}:
            fields["chat_template_kwargs"] = variables
        return fields

    def run(self) -> EvaluationResults:
        """Ask the server all questions, and return the figures."""
        refusals: list[str] = []
        answers = ask(
            self.model,
            self.questions,
            self.fields(),
            refusals,
            lambda questions: track(questions, "asking the server"),
        )
        figures = report.summarise_served(answers, self.model.name, self.protocol)
        explanations = [report.explanation_of_served(len(self.questions), self.model.url)]
        growth = total_growth(answers)
        strangers = sum(answer.tokens_of_strangers for answer in answers)
        content: dict[str, Any] = {
            "settings": self.settings,
            "server": {
                "url": self.model.url,
                "model": self.model.name,
                "counters": growth.names,
                "drafts": growth.drafts,
                "tokens_of_strangers": strangers,
                "refused_turns": len(refusals),
            },
        }
        left_out = (
            f"{len(refusals)} turns and those after them were left out: the server refused them"
        )
        if refusals:
            explanations.append(f"{left_out}. The first refusal: {refusals[0]}")
        if strangers:
            explanations.append(
                f"The server also generated {strangers} tokens for requests of others, which its"
                " counters include: measure it again while nobody else uses it."
            )
        golden = {}
        if self.protocol is not None:
            measure = self.protocol.measure_for(growth.steps)
            texts = differences(
                self.protocol,
                questions=len(self.questions),
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                has_template=self.model.chat,
                measure=measure,
                thinking=self.thinking,
                drafts={}
                if growth.draft_length is None
                else {self.model.name: f"chain of {growth.draft_length}"},
            )
            texts += [left_out] if refusals else []
            explanations.append(report.explanation_of_protocol(self.protocol, measure, texts))
            content["protocol"] = {"name": self.protocol.name, "differences": texts}
            if self.protocol.name == "speed-bench" and growth.draft_length is not None:
                golden[self.model.name] = self._golden_text(figures, growth.draft_length)
        return EvaluationResults(content, figures, explanations, golden, has_picture=False)

    def _golden_text(self, figures: report.Results, draft_length: int) -> str:
        lengths = figures[report.OVERALL][self.model.name]
        length = lengths["acceptance_length_of_drafts"]
        if length is None:  # SGLang's names, which count no accepted tokens
            length = lengths["acceptance_length_pooled"]
        notes = golden_notes(self.questions, self.max_new_tokens, self.sampling)
        notes.append(f"measured through {self.model.url}")
        return golden_yaml(self.model.name, self.thinking, {draft_length: length}, notes)
