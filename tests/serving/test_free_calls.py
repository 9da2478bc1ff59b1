"""Texts with a grammar in calls without masks: those of a slow oracle, whatever calls are made."""

from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np
import pytest

import specjax
from specjax.decoding.constrained import FORCED
from specjax.drafters import DraftModel
from specjax.drafts.shapes import Chain
from specjax.sampling import make_key
from specjax.serving import Engine
from specjax.serving.choice import DraftChoice
from specjax.serving.constrained_calls import ConstrainedCalls
from tests.conftest import HYBRID, compilations, tiny_target
from tests.decoding.test_constrained import DRAFTERS, END, GRAMMARS, VOCABULARY, compiler, models
from tests.grammars.oracle import Oracle
from tests.grammars.tokenizers_for_tests import small_tokenizer

NEW = 20
Kinds = Literal["chosen", "masked", "free"]
SHARED = np.random.default_rng(2).integers(0, VOCABULARY - 1, 17).tolist()
PROMPTS = [
    [*(SHARED if index % 2 else []), *prompt]
    for index, prompt in enumerate(
        np.random.default_rng(1).integers(0, VOCABULARY - 1, (15, 9)).tolist()
    )
]
GRAMMARS_OF_ROWS = [*GRAMMARS.values(), None]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
]


def target_of(model: str) -> Any:
    return tiny_target(vocab_size=VOCABULARY, **HYBRID) if model == "hybrid" else models()[0]


def engine(drafter: str, model: str = "plain", **options: Any) -> Engine:
    target, draft_model = target_of(model), models()[1]
    if model == "hybrid":
        engine_of_test = DraftModel(
            tiny_target(seed=5, vocab_size=VOCABULARY, **HYBRID), draft=Chain(3)
        )
    else:
        engine_of_test = DRAFTERS[drafter](target, draft_model)
    sizes: dict[str, Any] = {"rows": 4, "capacity": 64, "page": 8, "chunk": 16, "steps": 4}
    sizes |= {"tokenizer": small_tokenizer(), "grammars": True, "widths": (4,)}
    return Engine(target, engine_of_test, **sizes | options)


def cases() -> list[tuple[list[int], Any, int, dict[str, Any]]]:
    """Return prompts, grammars, seeds and sampling parameters; a sixth of the texts is free."""
    return [
        (prompt, GRAMMARS_OF_ROWS[index % 6], index, SETTINGS[index % 3])
        for index, prompt in enumerate(PROMPTS)
    ]


def expected(target: Any, prompt: list[int], grammar: Any, seed: int, setting: Any) -> list[int]:
    """Return the oracle's text; a free one is that of `specjax.generate` without a drafter."""
    key = jax.random.fold_in(make_key(seed), np.uint32(0))
    if grammar is not None:
        return Oracle(target, compiler(), grammar, (END,), **setting).text(prompt, key, NEW)
    result = specjax.generate(
        target,
        None,
        [prompt],
        max_new_tokens=NEW,
        sampling=specjax.Sampling(**setting),
        key=key[None],
        eos_token_ids=(END,),
        rule="coupled",
    )
    return result.tokens[0, len(prompt) : result.lengths[0]].tolist()


@pytest.mark.full
@pytest.mark.thorough_except("chosen-dynamic tree-plain")
@pytest.mark.parametrize(
    ("kinds", "drafter", "model"),
    [
        ("free", "chain", "plain"),
        ("chosen", "dynamic tree", "plain"),
        ("free", "chain", "hybrid"),
        ("free", "none", "plain"),
        ("free", "sampled tree", "plain"),
        ("free", "EAGLE-3 of few tokens", "plain"),
        ("masked", "chain", "plain"),
        ("free", "prompt lookup", "plain"),
        ("free", "the target itself", "plain"),
        ("free", "static tree", "plain"),
        ("free", "dynamic tree", "plain"),
        ("chosen", "chain", "plain"),
        ("chosen", "chain", "hybrid"),
    ],
)
def test_every_text_is_the_oracles(kinds: Kinds, drafter: str, model: str) -> None:
    """Check requests of all grammars in four rows, with preemptions and shared prefixes."""
    with engine(drafter, model, pages=11) as served:
        served._loop._constrained.kinds = kinds
        cancelled = served.submit(PROMPTS[0], grammar=GRAMMARS["anything"], max_new_tokens=40)
        handles = [
            served.submit(
                prompt,
                max_new_tokens=NEW,
                seed=seed,
                eos_token_ids=(END,),
                grammar=grammar,
                **setting,
            )
            for prompt, grammar, seed, setting in cases()
        ]
        handles[3].cancel()
        cancelled.cancel()
        results = [h.result(timeout=300).tokens for h in handles if h is not handles[3]]
        statistics = served.statistics
    assert statistics.preemptions > 0 and statistics.prompt_tokens_shared > 0
    assert (statistics.restored_rows > 0) == (kinds != "masked")
    assert statistics.mask_seconds > 0
    texts = [expected(target_of(model), *case) for case in cases()]
    assert [list(tokens) for tokens in results] == texts[:3] + texts[4:]


@pytest.mark.thorough
def test_log_probabilities_are_those_of_masked_steps_and_nothing_is_compiled() -> None:
    def run(kinds: Kinds) -> tuple[list[Any], list[Any]]:
        served._loop._constrained.kinds = kinds
        handles = [
            served.submit(
                PROMPTS[index],
                max_new_tokens=NEW,
                seed=index,
                temperature=1.0,
                eos_token_ids=(END,),
                grammar=grammar,
                logprobs=2 if index % 2 else None,
            )
            for index, grammar in enumerate(GRAMMARS_OF_ROWS)
        ]
        for handle in handles:
            handle.result(timeout=300)
        pieces = [[token for piece in handle for token in piece.logprobs] for handle in handles]
        return [(h.tokens, h.grammar_completed) for h in handles], pieces

    with engine("chain", max_logprobs=2) as served:
        run("chosen")
        before = compilations()
        texts, logprobs = run("masked")
        free_texts, free_logprobs = run("free")
        assert compilations() == before
        assert served.statistics.restored_rows > 0
    assert free_texts == texts
    for of_text, of_free_text in zip(logprobs, free_logprobs, strict=True):
        np.testing.assert_allclose(
            [token.logprob for token in of_free_text],
            [token.logprob for token in of_text],
            atol=1e-4,
        )


@pytest.mark.full
def test_a_legal_text_is_decoded_without_masks_and_forced_tokens_are_counted() -> None:
    """Check what the choice makes of a legal text, and the counters of masked steps."""
    schema = GRAMMARS["schema"]
    with engine("none", rows=2, widths=(2,), steps=8) as served:
        for _ in range(3):
            served.submit(
                PROMPTS[0], max_new_tokens=40, eos_token_ids=(), grammar=GRAMMARS["anything"]
            ).result(timeout=300)
        counts = served._loop._constrained.counts
        calls = served.statistics.decode_calls
        assert counts.restored_rows == 0 and counts.free_calls > calls / 2
        served._loop._constrained.kinds = "free"
        seconds = counts.mask_seconds  # no mask is made, but tokens are checked
        served.submit(
            PROMPTS[0], max_new_tokens=20, eos_token_ids=(), grammar=GRAMMARS["anything"]
        ).result(timeout=300)
        assert counts.mask_seconds > seconds
        served._loop._constrained.kinds = "masked"
        for seed in range(3):
            served.submit(
                PROMPTS[0], max_new_tokens=40, seed=seed, eos_token_ids=(), grammar=schema
            ).result(timeout=300)
        assert counts.forced_tokens > FORCED


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", ["embedded:draft", "embedded:eagle3", "embedded:mtp"])
def test_embedded_drafters_emit_the_text_of_decoding_without_a_drafter(drafter: str) -> None:
    """Check the tokenizer of the embedded target, which has all bytes, unlike the small one."""
    generate = specjax.load("embedded", drafter)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}
    schema |= {"required": ["name"], "additionalProperties": False}
    grammars = [
        specjax.JsonSchema(schema, whitespace=False),
        specjax.Regex("[^e]*"),
        specjax.Choice(["function", "functional", "finally"]),
        specjax.JsonObject(),
    ]
    prompts = [generate.encode(text) for text in ("x = ", "import os", "def f", "class A")]
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": 4}
    with Engine(generate, grammars=True, rows=4, widths=(4,), capacity=64) as served:
        texts = []
        for kinds in ("masked", "free", "chosen"):
            served._loop._constrained.kinds = kinds
            handles = [
                served.submit(prompt, grammar=grammar, eos_token_ids=(0,), **options)
                for prompt, grammar in zip(prompts, grammars, strict=True)
            ]
            texts.append([list(handle.result(timeout=600).tokens) for handle in handles])
        assert served.statistics.restored_rows > 0
    compiled = [generate.grammar_compiler.compile(grammar) for grammar in grammars]
    key = jax.random.fold_in(make_key(4), np.uint32(0))
    expected_texts = []
    for prompt, grammar in zip(prompts, compiled, strict=True):
        result = specjax.generate(
            generate.target,
            None,
            [prompt],
            max_new_tokens=24,
            sampling=specjax.Sampling(temperature=0.8),
            key=key[None],
            eos_token_ids=(0,),
            grammar=grammar,
        )
        expected_texts.append(result.tokens[0, len(prompt) : result.lengths[0]].tolist())
    assert texts == [expected_texts] * 3


@pytest.mark.full
def test_texts_do_not_depend_on_pauses_of_drafts(monkeypatch) -> None:
    """Check masked steps, free calls and replays among steps without drafts, at random."""
    rng, pauses = np.random.default_rng(3), []

    def pause_at_random(self: ConstrainedCalls, seconds: float, *_: Any, **__: Any) -> None:
        pauses.append(int(rng.integers(0, 3)))
        self._pause_left = pauses[-1]

    monkeypatch.setattr(ConstrainedCalls, "_record_masks", pause_at_random)
    for kinds in ("masked", "free"):
        pauses.clear()
        with engine("chain") as served:
            served._loop._constrained.kinds = kinds
            handles = [
                served.submit(
                    prompt,
                    max_new_tokens=NEW,
                    seed=seed,
                    eos_token_ids=(END,),
                    grammar=grammar,
                    **setting,
                )
                for prompt, grammar, seed, setting in cases()[:8]
            ]
            results = [list(handle.result(timeout=300).tokens) for handle in handles]
        assert min(pauses) == 0 < max(pauses)
        assert results == [expected(target_of("plain"), *case) for case in cases()[:8]]


def test_steps_after_slow_masks_draft_nothing_for_a_while() -> None:
    """Check when drafts pause and go on, by the seconds of calls and whether they had drafts."""

    class Row:
        """Stands for a request, and for a matcher that forces three tokens."""

        compiled: Any
        leaving_rate = None

        def begin_step(self) -> None: ...

        def forced(self, most: int) -> list[int]:
            return [1, 2, 3][:most]

    free = DraftChoice([None, Chain(3)], {(8, 0): 0.010, (8, 1): 0.012})
    device: Any = SimpleNamespace(plain=0, masked=1, sizes=SimpleNamespace(steps=8))
    calls = ConstrainedCalls(device, free)
    row = Row()
    row.compiled = Row()
    matchers: Any = {row: row}

    def kind(seconds: float, rows: int = 8) -> str:
        """Make a call whose masks take so long, and return its kind."""
        host_tokens = calls.known_tokens(matchers, pytest.fail)
        call = calls.choose(host_tokens, rows, (8, 8), 1, 8)
        (tokens,) = host_tokens.values()
        has_draft = call.kind != "host" or bool(tokens)
        calls._record_masks(seconds, rows, has_draft)
        return call.kind if has_draft else "nothing"

    assert {kind(0.01) for _ in range(20)} <= {"drafted", "free", "host"}
    assert kind(0.041) != "nothing"
    quick = [kind(0.01) for _ in range(9)]
    assert quick[:8] == ["nothing"] * 8 and quick[8] != "nothing"
    # A pause is longer if the first call after it is slow again, up to a bound.
    lengths = []
    for _ in range(5):
        kind(0.041)
        lengths.append(calls._pause_left)
        while calls._pause_left:
            assert kind(0.01) == "nothing"
    assert lengths == [8, 16, 32, 64, 64]
    # The pause begins again while a step without drafts is slow. Many rows may take longer.
    kind(0.041)
    kind(0.041)
    assert calls._pause_left == 64
    # Quick steps without anything to draft end it, too, once it is over.
    for _ in range(66):
        calls._record_masks(0.01, 8, has_draft=False)
    assert (calls._pause, calls._pause_left) == (0, 0)
    assert kind(0.041, rows=16) != "nothing" and not calls._pause_left
