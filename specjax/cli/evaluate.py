"""The command ``specjax evaluate``: measure drafters on questions, or test them."""

import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from specjax import decoding, pipeline, text
from specjax.cli.evaluate_server import ServerMeasurement
from specjax.cli.evaluation_results import EvaluationResults, golden_notes, used_sampling
from specjax.cli.grammars import read_grammar
from specjax.cli.lossless import LosslessTest
from specjax.cli.option_files import read_lines
from specjax.decoding.options import GenerationOptions, bucket
from specjax.decoding.stats import Stats
from specjax.drafters import Drafter, NoDraft
from specjax.drafters.registry import OWN_CLASS, load_drafter, takes_corpus, without_corpus
from specjax.drafts.names import parse_shape
from specjax.drafts.shapes import Chain
from specjax.errors import InputError, check_minimum
from specjax.evaluation import losslessness
from specjax.evaluation.protocols import PROTOCOLS, AcceptanceProtocol, ProtocolName, differences
from specjax.evaluation.questions import SPEC_BENCH, Question, read_questions
from specjax.evaluation.served import MeasuredServer
from specjax.models.quantization import schemes
from specjax.processes import speaks
from specjax.progress import track
from specjax.reports import evaluation as report
from specjax.reports.evaluation import PLAIN, MethodAnswer
from specjax.reports.golden import Thinking, golden_yaml
from specjax.sampling import Rule
from specjax.sharding import mesh_for
from specjax.templates import Settings, check_is_chat, read_settings, thinking_switch


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure the speed and acceptance of drafters on questions, compared with plain decoding.

    A drafter is named as for ``generate``. The shape of its drafts may follow:
    "runs/eagle3/best@dynamic", "prompt-lookup@chain:6". Each turn of a question follows plain
    decoding's answers to the turns before, so that all methods read the same prompts.

    With ``lossless`` nothing is timed. Instead each drafter is tested: greedy and coupled text must
    be the same with the drafter as without, and sampled text must have the target's distribution.
    The exit status is 0 if all drafters pass, and 1 otherwise.

    With ``protocol`` the settings are those of a public measurement, and where a run differs from
    them it is stated. With ``server`` a running server answers, and its counters are read.

    Attributes:
        target: the target, a directory or hub id.
        drafter: one or more drafters.
        corpus: text files that the drafter suffix drafts from beside the text itself, of at most 16
            MiB together; the other drafters read none.
        questions: .jsonl file in the format of Spec-Bench or SPEED-Bench, or prompts: one per
            line, or JSON lines with "prompt" or "text".
        per_category: number of questions of each category to use, from the first; 0 is all.
        categories: categories whose questions to use, by the names in the tables; all if empty.
        protocol: settings of a public measurement of acceptance: the length of answers, the turns
            and how the acceptance length is computed; "speed-bench", "spec-bench" or "vllm-80".
        thinking: whether the model thinks before it answers, for templates with a switch; the
            default is the template's own.
        server: address of a server to measure in place of models, such as http://localhost:8000;
            specjax serve, vLLM or SGLang, alone on its machine and without other requests.
        served_model_name: with server, name of the model in requests; by default the first one that
            the server lists.
        api_key_file: with server, file with its API key.
        chat: apply the model's chat template to the questions; by default if it has one.
        chat_template: file with a Jinja chat template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the chat template, as JSON: '{"enable_thinking":
            false}'.
        max_new_tokens: maximum number of tokens of an answer; by default the protocol's, or 128.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from this many most likely tokens; 0 is no limit.
        top_p: sample from the most likely tokens with this total probability, in (0, 1].
        min_p: minimum probability of a token relative to the most likely one, in [0, 1].
        rule: how tokens are sampled and drafts verified, as in generate; the default is the best
            rule for each shape.
        json_schema: file with a JSON schema; answers are JSON that the schema accepts.
        regex: regular expression that every answer matches as a whole.
        choice: every answer is one of these.
        grammar_after: text or added token, such as </think>, after which the grammar of the three
            options before begins; what comes before it is free.
        repeats: number of timed runs of every answer. The results show their spread.
        seed: random seed.
        dtype: data type of the params, float32, bfloat16 or float16; the default is float32 on CPUs
            and bfloat16 elsewhere.
        weights: "int8", "w8a8", "int4" or "fp8" quantizes the weights, so that they are read
            faster; "float" dequantizes a quantized checkpoint; "stored" keeps the weights as they
            are.
        output: directory for results.json, results.md and results.png (with lossless: lossless.json
            and lossless.md), and with the protocol speed-bench for acceptance lengths in the form
            of InferenceX's golden files; if empty, results are only printed.
        lossless: test whether the text with each drafter is the target's own. Questions are
            optional, and only their first turns are used. With temperature 0, sampled text is
            tested at temperature 1, and at 1.4 with top_p 0.9.
        draws: with lossless, number of tokens that are sampled to test the distribution; more
            tokens detect smaller errors.
        json: with lossless, print one JSON object.
        mesh: number of devices of each mesh axis, data and model.
    """

    target: str = "embedded"
    drafter: tuple[str, ...] = ("embedded:draft",)
    corpus: tuple[str, ...] = ()
    questions: str = ""
    per_category: int = 0
    categories: tuple[str, ...] = ()
    protocol: ProtocolName | None = None
    thinking: Thinking | None = None
    server: str = ""
    served_model_name: str = ""
    api_key_file: str = ""
    chat: bool | None = None
    chat_template: str = ""
    chat_template_kwargs: str = ""
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    rule: Rule | None = None
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    grammar_after: str = ""
    repeats: int = 3
    seed: int = 0
    dtype: str = ""
    weights: str = schemes.AS_STORED
    output: str = ""
    lossless: bool = False
    draws: int = losslessness.DRAWS
    json: bool = False
    mesh: tuple[int, int] = (1, 1)


def run_evaluate(config: EvaluateConfig) -> int:
    """Run ``specjax evaluate``; return the exit status, which is 1 if a drafter is not lossless."""
    _check(config)
    output = Path(config.output) if config.output and speaks() else None
    if output is not None and output.is_file():
        raise InputError(f"output={config.output!r} is a file: give a directory")
    protocol = PROTOCOLS[config.protocol] if config.protocol else None
    if config.max_new_tokens is None:
        config = replace(config, max_new_tokens=protocol.max_new_tokens if protocol else 128)
    questions = _questions(config, protocol)
    if config.server:
        _server_measurement(config, questions, protocol).run().show(output)
        return 0
    options = _options(config)
    check_is_chat(config.chat is not False, config.chat_template, config.chat_template_kwargs)
    generator = pipeline.load(
        config.target,
        dtype=config.dtype or None,
        weights=config.weights,
        mesh=mesh_for(config.mesh),
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=None,
    )
    options = replace(options, grammar=generator.compile_grammar(options.grammar))
    names = [split_shape(name)[0] for name in config.drafter]
    if config.corpus and not any(map(takes_corpus, names)):
        raise without_corpus(" ".join(names), config.corpus)
    drafters = {name: _load(name, generator, options, config) for name in config.drafter}
    chat = bool(generator.tokenizer.chat_template) if config.chat is None else config.chat
    settings = {name: value for name, value in asdict(config).items() if name != "output"}
    machine = {
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "jax": jax.__version__,
    }
    about: dict[str, Any] = {"settings": settings, "machine": machine}
    if config.lossless:
        prompts = [question.turns[0] for question in questions] or None
        test = LosslessTest(generator, prompts, chat and bool(questions), options, config.draws)
        return test.run(drafters, about, output, config.json)
    variables = _thinking_variables(generator.tokenizer, config.thinking) if config.thinking else {}
    methods = {PLAIN: None, **drafters}
    asking = _Asking(generator, methods, options, chat, config.repeats, variables)
    answers = asking.all_of(questions)
    figures = report.summarise(answers, list(methods), protocol)
    about["prompts_cut"] = asking.cut
    cut = f"the beginning of {asking.cut} prompts, too long for the models, was cut off"
    explanations = [report.explanation(config.repeats, len(questions), machine["device"])]
    golden = {}
    if protocol is None:
        explanations += [cut] if asking.cut else []
    else:
        measure = protocol.measure_for(answers[0].steps)
        texts = differences(
            protocol,
            questions=len(questions),
            max_new_tokens=int(options.max_new_tokens),
            sampling=used_sampling(config),
            has_template=chat,
            measure=measure,
            thinking=config.thinking,
            drafts={name: str(drafter.draft_shape) for name, drafter in drafters.items()},
        )
        texts += [cut] if asking.cut else []
        explanations.append(report.explanation_of_protocol(protocol, measure, texts))
        about["protocol"] = {"name": protocol.name, "differences": texts}
        if protocol.name == "speed-bench":
            golden = _golden_texts(config, questions, drafters, figures)
    EvaluationResults(about, figures, explanations, golden).show(output)
    return 0


def _check(config: EvaluateConfig) -> None:
    """Refuse options that contradict each other, before anything is read."""
    check_minimum(1, config, ["repeats"])
    check_minimum(0, config, ["per_category"])
    if not config.questions and not config.lossless:
        raise InputError("questions='': give a file")
    if config.json and not config.lossless:
        raise InputError(
            "json=True: it requires --lossless; a measurement writes results.json to --output"
        )
    if len(set(config.drafter)) < len(config.drafter) or not config.drafter:
        raise InputError(f"drafter={config.drafter}: give at least one drafter, and none twice")
    if config.lossless and (config.protocol or config.server or config.thinking):
        raise InputError(
            "lossless=True: it measures no acceptance; leave out protocol, server and thinking"
        )
    if config.thinking and config.chat is False:
        raise InputError(
            f"thinking={config.thinking!r}: the chat template switches it; leave out chat=False"
        )
    for name in ("served_model_name", "api_key_file"):
        if getattr(config, name) and not config.server:
            raise InputError(f"{name}={getattr(config, name)!r}: it requires --server")


def _options(config: EvaluateConfig) -> GenerationOptions:
    grammar = read_grammar(config.json_schema, config.regex, config.choice, config.grammar_after)
    if config.lossless and grammar is not None:
        raise InputError(
            "lossless=True: it tests free text; leave out json_schema, regex and choice"
        )
    if config.protocol and grammar is not None:
        raise InputError(
            f"protocol={config.protocol!r}: its answers are free text; leave out json_schema, regex"
            " and choice"
        )
    options = pipeline.settings(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
        rule=config.rule,
        grammar=grammar,
    )
    options.sampling.rows(1)  # refuse invalid options before any weights are read
    return options


_WITH_SERVER = frozenset(
    {"questions", "per_category", "categories", "protocol", "thinking", "server"}
    | {"served_model_name", "api_key_file", "chat", "chat_template_kwargs", "max_new_tokens"}
    | {"temperature", "top_k", "top_p", "min_p", "seed", "output"}
)
"""The options that a measurement of a server reads."""


def _server_measurement(
    config: EvaluateConfig, questions: list[Question], protocol: AcceptanceProtocol | None
) -> ServerMeasurement:
    for option in fields(config):
        if option.name not in _WITH_SERVER and getattr(config, option.name) != option.default:
            raise InputError(
                f"server={config.server!r}: the server decides about {option.name}; leave it out"
            )
    keys = read_lines("api_key_file", config.api_key_file)
    settings = asdict(config)
    return ServerMeasurement(
        model=MeasuredServer(
            config.server,
            config.served_model_name,
            keys[0] if keys else None,
            chat=config.chat is not False,
        ),
        questions=questions,
        protocol=protocol,
        max_new_tokens=int(config.max_new_tokens or 0),
        sampling=used_sampling(config),
        seed=config.seed,
        thinking=config.thinking,
        variables=read_settings(config.chat_template_kwargs),
        settings={name: settings[name] for name in sorted(_WITH_SERVER - {"output"})},
    )


def _questions(config: EvaluateConfig, protocol: AcceptanceProtocol | None) -> list[Question]:
    if not config.questions:
        return []
    questions = read_questions(
        config.questions,
        config.per_category,
        tasks=SPEC_BENCH if protocol is None else protocol.tasks,
        categories=config.categories,
    )
    return questions if protocol is None else protocol.select(questions)


def _thinking_variables(tokenizer: Any, thinking: Thinking) -> dict[str, bool]:
    """Return the variable of the chat template that switches thinking on or off."""
    switch = thinking_switch(tokenizer)
    if switch is None:
        raise InputError(
            f"thinking={thinking!r}: the chat template has no switch for it; leave it out, or set"
            " the template's own variables with chat_template_kwargs"
        )
    return {switch: thinking == "on"}


def _golden_texts(
    config: EvaluateConfig,
    questions: list[Question],
    drafters: dict[str, Drafter],
    figures: report.Results,
) -> dict[str, str]:
    """Return a golden file's text for each drafter whose drafts are chains."""
    notes = golden_notes(questions, int(config.max_new_tokens or 0), used_sampling(config))
    lengths: dict[str, dict[int, float | None]] = {}
    for name, drafter in drafters.items():
        if isinstance(drafter.draft_shape, Chain):
            of_drafter = lengths.setdefault(split_shape(name)[0], {})
            of_drafter[drafter.draft_shape.length] = figures[report.OVERALL][name][
                "acceptance_length_of_drafts"
            ]
    return {
        where: golden_yaml(config.target, config.thinking, values, [*notes, f"drafter: {where}"])
        for where, values in lengths.items()
    }


def split_shape(name: str) -> tuple[str, str]:
    """Split a drafter's name from the shape that may follow it, empty if there is none.

    Examples:
        >>> from specjax.cli.evaluate import split_shape
        >>> split_shape("prompt-lookup@chain:6"), split_shape("early-exit:4")
        (('prompt-lookup', 'chain:6'), ('early-exit:4', ''))
        >>> split_shape("pack.age:Class@runs/best"), split_shape("pack.age:Class@runs/best@eagle")
        (('pack.age:Class@runs/best', ''), ('pack.age:Class@runs/best', 'eagle'))
    """
    own_class = OWN_CLASS.fullmatch(name)
    location = own_class[3] if own_class else name
    if "@" not in location or Path(location).expanduser().is_dir():
        return name, ""
    where, _, shape = name.rpartition("@")
    return where, shape


def _load(
    name: str, generator: pipeline.TextGenerator, options: GenerationOptions, config: EvaluateConfig
) -> Drafter:
    """Load a drafter, whose name may end with a shape: ``WHERE@chain:4``."""
    where, shape = split_shape(name)
    target, draft_shape = generator.target, parse_shape(shape) if where != name else None
    takes_files = bool(config.corpus) and takes_corpus(where)  # others may be among the drafters
    drafter = load_drafter(
        *(where, draft_shape, target.config, target.dtype, target.mesh, generator.tokenizer),
        weights=config.weights,
        corpus=config.corpus if takes_files else (),
    )
    options.rule_for(drafter.draft_shape)  # refuse an unsuitable rule before anything is timed
    return drafter


class _Asking:
    """A run in which every method answers every turn several times, in alternation."""

    def __init__(
        self,
        generator: pipeline.TextGenerator,
        methods: dict[str, Drafter | None],
        options: GenerationOptions,
        chat: bool,
        repeats: int,
        variables: Settings,
    ) -> None:
        self._generator, self._methods, self._options = generator, methods, options
        self._chat, self._repeats, self._variables = chat, repeats, variables
        self.cut = 0  # prompts whose beginning was cut off
        self._compiled: set[tuple[int, int]] = set()

    def all_of(self, questions: list[Question]) -> list[MethodAnswer]:
        """Return the answers of every method to every turn."""
        answers = []
        assert self._options.key is not None
        for index, question in enumerate(track(questions, "answering questions")):
            history: list[dict[str, str]] = []
            for turn, question_text in enumerate(question.turns):
                history.append({"role": "user", "content": question_text})
                prompt = self._encode(history)
                key = jax.random.fold_in(jax.random.fold_in(self._options.key, index), turn)
                turn_answers, answer = self._turn(index, question.category, prompt, key)
                answers += turn_answers
                history.append({"role": "assistant", "content": answer})
        return answers

    def _encode(self, history: list[dict[str, str]]) -> list[int]:
        prompt = history if self._chat else "\n".join(message["content"] for message in history)
        variables = self._variables if self._chat else None
        ids = self._generator.encode(prompt, chat_template_kwargs=variables or None)
        target = self._generator.target
        positions = min(
            decoding.most_positions(target, drafter or NoDraft())
            for drafter in self._methods.values()
        )
        room = positions - int(self._options.max_new_tokens)
        if room < 1:
            raise InputError(
                f"max_new_tokens={self._options.max_new_tokens}: the models have only {positions}"
                " positions"
            )
        self.cut += len(ids) > room
        return ids[-room:]

    def _turn(
        self, question: int, category: str, prompt: list[int], key: jax.Array
    ) -> tuple[list[MethodAnswer], str]:
        tokens, lengths = text.pad([prompt])
        options = vars(replace(self._options, key=key))

        def run(drafter: Drafter | None) -> decoding.Result:
            return decoding.generate(self._generator.target, drafter, tokens, lengths, **options)

        timed: dict[str, list[tuple[float, Stats]]] = {name: [] for name in self._methods}
        shape = bucket(len(prompt)), bucket(len(prompt) + int(self._options.max_new_tokens))
        if shape not in self._compiled:
            for drafter in self._methods.values():
                run(drafter)
            self._compiled.add(shape)
        answer: list[int] = []
        for _ in range(self._repeats):
            for name, drafter in self._methods.items():
                started = time.perf_counter()
                result = run(drafter)
                timed[name].append((time.perf_counter() - started, result.stats))
                if name == PLAIN:
                    answer = result.tokens[0, len(prompt) : int(result.lengths[0])].tolist()
        answers = [
            MethodAnswer(
                question, category, name, tuple(seconds for seconds, _ in runs), runs[-1][1]
            )
            for name, runs in timed.items()
        ]
        return answers, _text_of(self._generator.tokenizer, prompt, answer, self._chat)


def _text_of(tokenizer: Any, prompt: list[int], tokens: list[int], is_chat: bool) -> str:
    """Return an answer's text for the prompt of the next turn, without reasoning channels."""
    if is_chat and text.FinalChannel.reads(tokenizer, prompt):
        return text.FinalChannel(tokenizer, prompt).push(tokens, last=True)
    return tokenizer.decode(tokens, skip_special_tokens=True)
