"""Constrained texts in the engine: those of `specjax.generate`, beside free rows."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax.decoding.constrained import legal_tokens
from specjax.drafters import Drafter, PromptLookup, Together, TokenRecycling
from specjax.drafts.shapes import Chain
from specjax.errors import InputError, LogitsError
from specjax.models.transformer import Target
from specjax.sampling import make_key
from specjax.serving import Engine, constrained_calls
from specjax.serving.handle import EngineError, Handle, TextCancelledError
from tests.conftest import compilations
from tests.decoding.test_constrained import (
    DRAFTERS,
    END,
    GRAMMARS,
    SCHEMA,
    VOCABULARY,
    compiler,
    models,
)
from tests.grammars.oracle import Oracle
from tests.grammars.tokenizers_for_tests import small_tokenizer

NEW = 20


@struct.dataclass
class BrokenAtSevens(Target):
    """A target whose logits are NaN where the logit of token 7 is large."""

    def head(self, hidden: jax.Array) -> jax.Array:
        logits = super().head(hidden)
        return jnp.where(logits[..., 7:8] > 1.7, jnp.nan, logits)


PROMPTS = np.random.default_rng(1).integers(0, VOCABULARY - 1, (12, 9)).tolist()


SIZES: dict[str, Any] = {
    "rows": 4,
    "widths": (1, 4),
    "capacity": 64,
    "page": 8,
    "pages": 9,
    "chunk": 16,
    "steps": 4,
}
"""The sizes of the engines: few pages, so that texts are preempted where rows are full.

Engines of equal sizes share their programs, here and in `test_thinking`."""


def engine(drafter: str | Drafter = "chain", **options: Any) -> Engine:
    target, model = models()
    target = options.pop("target", target)
    return Engine(
        target,
        DRAFTERS[drafter](target, model) if isinstance(drafter, str) else drafter,
        **SIZES | {"tokenizer": small_tokenizer(), "grammars": True} | options,
    )


def expected(prompt: list[int], grammar: Any, seed: int, temperature: float) -> list[int]:
    """Return the output of `specjax.generate` without a drafter."""
    key = jax.random.fold_in(make_key(seed), np.uint32(0))
    result = specjax.generate(
        models()[0],
        None,
        [prompt],
        max_new_tokens=NEW,
        sampling=specjax.Sampling(temperature=temperature),
        key=key[None],
        eos_token_ids=(END,),
        rule="coupled",
        grammar=None if grammar is None else compiler().compile(grammar),
    )
    return result.tokens[0, len(prompt) : result.lengths[0]].tolist()


@pytest.mark.full
@pytest.mark.thorough_except("dynamic tree")
@pytest.mark.parametrize("drafter", ["chain", "none", "dynamic tree"])
def test_every_text_is_that_of_generate(drafter) -> None:
    """Check twelve requests in four rows, a third of them free, with few pages."""
    grammars = [*GRAMMARS.values(), None]
    cases = [
        (prompt, grammars[index % len(grammars)], index, float(index % 2))
        for index, prompt in enumerate(PROMPTS)
    ]
    with engine(drafter) as served:
        served.submit(PROMPTS[0], max_new_tokens=2).result(timeout=60)
        before = compilations()
        handles = [
            served.submit(
                prompt,
                max_new_tokens=NEW,
                temperature=temperature,
                seed=seed,
                eos_token_ids=(END,),
                grammar=grammar,
            )
            for prompt, grammar, seed, temperature in cases
        ]
        results = [handle.result(timeout=120) for handle in handles]
        assert served.statistics.preemptions > 0
        again = served.submit(
            PROMPTS[0], max_new_tokens=NEW, grammar=GRAMMARS["lark"], eos_token_ids=(END,)
        )
        again.result(timeout=60)
        assert compilations() == before
    for handle, result, (prompt, grammar, seed, temperature) in zip(
        handles, results, cases, strict=True
    ):
        assert list(result.tokens) == expected(prompt, grammar, seed, temperature)
        if grammar is None:
            assert handle.grammar_completed is None
        else:
            matcher = compiler().compile(grammar).matcher((END,))
            matcher.append(result.tokens)
            assert handle.grammar_completed == matcher.is_complete
            assert handle.finish_reason == ("stop" if result.tokens[-1] == END else "length")
            assert result.grammar_completed == handle.grammar_completed


@pytest.mark.thorough
def test_programs_can_be_lowered_in_the_middle_of_a_masked_step() -> None:
    """Check what the thread that compiles in the background may meet."""
    with engine(max_prediction=2, warm=False) as served:
        config = served._config
    device = config.device(None)
    table, free = np.full((4, 8), device.sizes.pages, np.int32), np.ones(4, bool)
    draft = device.propose(device.copying, table, free, 4)
    programs = device.programs(config.placeholder_settings())
    for program in programs:
        program.lower()
    legal, _ = legal_tokens([None] * 4, jax.device_get(draft), VOCABULARY)
    progress = device.advance(device.copying, table, free, None, legal, 4, False)
    assert progress.done.all() and len(programs) > 10


@pytest.mark.full
def test_a_text_that_no_token_ends_stops_with_its_grammar() -> None:
    schema = specjax.JsonSchema(SCHEMA, whitespace=False)
    with engine() as served:
        handle = served.submit(PROMPTS[0], max_new_tokens=50, eos_token_ids=(), grammar=schema)
        text = handle.result(timeout=60).text
        short = served.submit(PROMPTS[0], max_new_tokens=2, eos_token_ids=(), grammar=schema)
        short.result(timeout=60)
    assert set(json.loads(text)) == {"ab", "de"}
    assert (handle.finish_reason, handle.grammar_completed) == ("stop", True)
    assert (short.finish_reason, short.grammar_completed) == ("length", False)


@pytest.mark.full
def test_what_is_not_supported_is_refused_by_name() -> None:
    grammar = specjax.Regex("(ab)+")
    with engine(warm=False) as served:
        with pytest.raises(InputError, match=r"grammar='a': give specjax\.JsonSchema"):
            served.submit(PROMPTS[0], grammar="a")
        with pytest.raises(InputError, match="grammar="):
            served.submit(PROMPTS[0], grammar=specjax.Regex("("))
    with (
        engine(grammars=False, warm=False) as served,
        pytest.raises(InputError, match="no grammars; give Engine"),
    ):
        served.submit(PROMPTS[0], grammar=grammar)
    with pytest.raises(InputError, match="grammars: they need the target's tokenizer"):
        engine(tokenizer=None)


@pytest.mark.thorough
def test_log_probabilities_and_predictions_beside_and_under_a_grammar() -> None:
    """Compare each request with the same one alone, in an engine without grammars."""
    options = {"max_new_tokens": 12, "temperature": 1.0, "eos_token_ids": (END,)}
    predicted = expected(PROMPTS[2], None, 2, 1.0)
    with engine(grammars=False, max_logprobs=3, max_prediction=4) as alone:
        reported = alone.submit(PROMPTS[1], seed=1, logprobs=2, **options)
        copied = alone.submit(PROMPTS[2], seed=2, prediction=predicted, **options)
        results = [handle.result(timeout=120) for handle in (reported, copied)]
    with engine(max_logprobs=3, max_prediction=4) as served:
        constrained = [
            served.submit(prompt, seed=3, logprobs=2, grammar=GRAMMARS["anything"], **options)
            for prompt in PROMPTS[:2]
        ]
        beside = served.submit(PROMPTS[1], seed=1, logprobs=2, **options)
        copying = served.submit(PROMPTS[2], seed=2, prediction=predicted, **options)
        assert beside.result(timeout=120).tokens == results[0].tokens
        assert copying.result(timeout=120).tokens == results[1].tokens
        for handle in constrained:
            handle.result(timeout=120)
    assert copying.predicted_tokens == copied.predicted_tokens > 0

    def logprobs(handle: Any) -> list[float]:
        return [token.logprob for piece in handle for token in piece.logprobs]

    np.testing.assert_allclose(logprobs(beside), logprobs(reported), atol=1e-4)
    for handle in constrained:
        assert len(logprobs(handle)) == len(handle.tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", ["none", "dynamic tree"])
def test_a_prediction_changes_the_time_of_a_constrained_text_alone(drafter, monkeypatch) -> None:
    """Check right, wrong and illegal predictions beside a free row, with few pages."""
    # A busy machine makes masks slow. Steps after slow masks draft nothing, so there are more.
    monkeypatch.setattr(constrained_calls, "STALL_SECONDS", (60.0, 60.0))
    grammars = [*GRAMMARS.values(), None]
    texts = [
        expected(prompt, grammars[index % len(grammars)], index, float(index % 2))
        for index, prompt in enumerate(PROMPTS)
    ]
    predictions = [list(text) for text in texts]
    for index, prediction in enumerate(predictions):
        if index % 3:
            prediction[len(prediction) // 2] = (prediction[len(prediction) // 2] + 1) % END
    predictions[3] = predictions[8] = [7] * NEW
    with engine(drafter, max_prediction=6) as served:
        served.submit(PROMPTS[0], max_new_tokens=2).result(timeout=60)
        before = compilations()
        handles = [
            served.submit(
                prompt,
                max_new_tokens=NEW,
                temperature=float(index % 2),
                seed=index,
                eos_token_ids=(END,),
                grammar=grammars[index % len(grammars)],
                prediction=None if index == 11 else predictions[index],
            )
            for index, prompt in enumerate(PROMPTS)
        ]
        results = [list(handle.result(timeout=120).tokens) for handle in handles]
        # Whether free calls are faster than steps that copy depends on the machine's load.
        served._loop._constrained.kinds = "masked"
        alone = served.submit(
            PROMPTS[1],
            max_new_tokens=NEW,
            temperature=1.0,
            seed=1,
            eos_token_ids=(END,),
            grammar=grammars[1],
            prediction=texts[1],
        )
        alone.result(timeout=60)
        assert compilations() == before
        assert served.statistics.preemptions > 0
    assert results == texts
    assert alone.predicted_tokens == len(texts[1])
    # Six copied tokens and the target's own take one step.
    assert alone.result().statistics.steps <= -(-len(texts[1]) // 7) + 1


@pytest.mark.full
def test_the_texts_of_a_union_with_grammars_and_predictions_are_those_of_plain_decoding(
    monkeypatch,
) -> None:
    """Check texts without predictions, and then with right and wrong ones."""
    monkeypatch.setattr(constrained_calls, "STALL_SECONDS", (60.0, 60.0))  # see above
    union = Together((PromptLookup(draft=2), TokenRecycling(successors=2, draft=Chain(2))))
    # In the second one half of the tokens are legal, and which of them depends on the depth.
    grammars = [GRAMMARS["schema"], specjax.Regex("([a-f01][c-f{}:,][ab01:,{}])+"), None]
    texts = [
        expected(prompt, grammars[index % 3], index, 0.3) for index, prompt in enumerate(PROMPTS)
    ]
    predictions = [list(text) for text in texts]
    for prediction in predictions[::2]:
        prediction[len(prediction) // 2] = (prediction[len(prediction) // 2] + 1) % END
    sizes: dict[str, Any] = {"widths": (4,), "warm": False, "max_prediction": 4}
    with engine(union, drafts=[union.draft_shape], **sizes) as served:
        served._loop._constrained.kinds = "masked"  # the engine's choice would depend on times

        def handles(predictions: list[Any]) -> list[Handle]:
            return [
                served.submit(
                    prompt,
                    max_new_tokens=NEW,
                    temperature=0.3,
                    seed=index,
                    eos_token_ids=(END,),
                    grammar=grammars[index % 3],
                    prediction=predictions[index],
                )
                for index, prompt in enumerate(PROMPTS)
            ]

        without = handles([None] * len(texts))
        assert [list(handle.result(timeout=120).tokens) for handle in without] == texts
        parts = served.statistics.parts
        copied = handles(predictions)
        assert [list(handle.result(timeout=120).tokens) for handle in copied] == texts
    assert min(part.accepted_only for part in parts) > 0
    assert sum(handle.predicted_tokens > 0 for handle in copied) > len(texts) // 2


@pytest.mark.full
def test_a_text_that_cannot_go_on_fails_alone() -> None:
    with engine() as served:
        stuck = served.submit(
            PROMPTS[0], max_new_tokens=9, grammar=specjax.Choice(["df"]), eos_token_ids=(5, END)
        )
        whole = served.submit(
            PROMPTS[1], max_new_tokens=9, grammar=specjax.Choice(["df"]), eos_token_ids=(END,)
        )
        assert whole.result(timeout=60).text == "df"
        with pytest.raises(EngineError, match="cannot go on"):
            stuck.result(timeout=60)


# --- what ends or disturbs a text -----------------------------------------------------------------


@pytest.mark.full
def test_a_stop_string_inside_the_grammar_ends_a_text_that_is_not_whole() -> None:
    grammar = specjax.Choice(["abcabcdeabcde", "abcabcdeabcd01"])
    with engine() as served:
        cut = served.submit(
            PROMPTS[0], max_new_tokens=NEW, eos_token_ids=(END,), grammar=grammar, stop="dea"
        )
        beside = served.submit(
            PROMPTS[1], max_new_tokens=NEW, eos_token_ids=(END,), grammar=grammar, stop="f"
        )
        assert cut.result(timeout=60).text == "abcabc"
        assert beside.result(timeout=60).text in ("abcabcdeabcde", "abcabcdeabcd01")
    assert (cut.finish_reason, cut.grammar_completed) == ("stop", False)
    assert (beside.finish_reason, beside.grammar_completed) == ("stop", True)


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_new_tokens_holds_unless_the_grammar_allows_the_end_alone(temperature) -> None:
    """Compare with `specjax.generate`; some texts would be shorter without the minimum."""
    grammars = [specjax.Regex("d(ab)*"), specjax.Choice(["d"]), specjax.Regex("(a|de|f)+")]
    ends = (END, 5, 6, 7)
    options = {"max_new_tokens": NEW, "eos_token_ids": ends, "min_new_tokens": 6}
    cases = list(zip(PROMPTS[:9], grammars * 3, range(9), strict=True))

    def alone(prompt: list[int], grammar: Any, seed: int, **changes: Any) -> list[int]:
        result = specjax.generate(
            models()[0],
            None,
            [prompt],
            sampling=specjax.Sampling(temperature=temperature),
            key=jax.random.fold_in(make_key(seed), np.uint32(0))[None],
            rule="coupled",
            grammar=compiler().compile(grammar),
            **options | changes,
        )
        return result.tokens[0, len(prompt) : result.lengths[0]].tolist()

    with engine(pages=32) as served:
        handles = [
            served.submit(prompt, grammar=grammar, seed=seed, temperature=temperature, **options)
            for prompt, grammar, seed in cases
        ]
        texts = [list(handle.result(timeout=120).tokens) for handle in handles]
    assert texts == [alone(*case) for case in cases]
    for text, (_, grammar, _) in zip(texts, cases, strict=True):
        if grammar == grammars[1]:
            assert text[0] == 3 and text[1] in ends and len(text) == 2
        else:
            assert len(text) > 6
    if temperature:
        free = [alone(*case, min_new_tokens=0) for case in cases if case[1] != grammars[1]]
        assert min(map(len, free)) <= 6


@pytest.mark.thorough
def test_a_text_that_is_cancelled_in_the_middle_disturbs_no_other() -> None:
    """Cancel texts after their first tokens; then their rows have other texts and grammars."""
    endless = specjax.Regex("(ab|c|de){200,}f:")  # it cannot end before it is cancelled
    with engine(rows=2, capacity=256, pages=64, widths=[2]) as served:
        for index in range(3):
            cancelled = served.submit(
                PROMPTS[index],
                max_new_tokens=240,
                seed=index,
                temperature=1.0,
                eos_token_ids=(END,),
                grammar=endless,
            )
            beside = served.submit(
                PROMPTS[3 + index],
                max_new_tokens=NEW,
                seed=index,
                temperature=1.0,
                eos_token_ids=(END,),
                grammar=GRAMMARS["schema"],
            )
            next(iter(cancelled))
            cancelled.cancel()
            result = beside.result(timeout=60)
            assert list(result.tokens) == expected(
                PROMPTS[3 + index], GRAMMARS["schema"], index, 1.0
            )
            with pytest.raises(TextCancelledError):
                cancelled.result(timeout=60)
            assert cancelled.finish_reason == "cancelled"
            matcher = compiler().compile(endless).matcher((END,))
            matcher.append(cancelled.tokens)  # what had come is legal
            assert not cancelled.grammar_completed


@pytest.mark.thorough
def test_logits_that_are_nan_end_the_constrained_text_of_their_row_alone() -> None:
    broken = BrokenAtSevens(**vars(models()[0]))
    grammar, options = GRAMMARS["regex"], {"max_new_tokens": NEW, "eos_token_ids": (END,)}
    fine: dict[int, list[int]] = {}
    for row, prompt in enumerate(PROMPTS[:8]):
        try:
            result = specjax.generate(
                broken, None, [prompt], grammar=compiler().compile(grammar), **options
            )
        except LogitsError as error:
            result = error.result
        else:
            fine[row] = result.tokens[0, len(prompt) : result.lengths[0]].tolist()
    assert 0 < len(fine) < 8
    with engine(target=broken, drafts=[Chain(3)], pages=32, widths=[4]) as served:
        handles = [
            served.submit(prompt, grammar=grammar, temperature=0.0, **options)
            for prompt in PROMPTS[:8]
        ]
        for row, handle in enumerate(handles):
            if row in fine:
                assert list(handle.result(timeout=300).tokens) == fine[row]
            else:
                with pytest.raises((LogitsError, EngineError)):
                    handle.result(timeout=300)
                matcher = compiler().compile(grammar).matcher((END,))
                matcher.append(handle.tokens)  # what had come is legal
                assert handle.grammar_completed == matcher.is_complete


@pytest.mark.full
def test_shared_prefixes_change_no_constrained_text() -> None:
    """Check one prompt three times: alone, with its own pages, and under another salt."""
    prompt = [*PROMPTS[0], *PROMPTS[1], *PROMPTS[2]]
    grammars = [GRAMMARS["schema"], GRAMMARS["regex"], GRAMMARS["schema"]]
    with engine() as served:
        handles = []
        for grammar, salt in zip(grammars, ("", "", "another"), strict=True):
            handles.append(
                served.submit(
                    prompt,
                    max_new_tokens=NEW,
                    seed=4,
                    temperature=1.0,
                    eos_token_ids=(END,),
                    grammar=grammar,
                    cache_salt=salt,
                )
            )
            handles[-1].result(timeout=60)
    assert [handle.cached_tokens > 0 for handle in handles] == [False, True, False]
    for handle, grammar in zip(handles, grammars, strict=True):
        assert list(handle.tokens) == expected(prompt, grammar, 4, 1.0)


@pytest.mark.full
def test_a_requests_own_end_tokens_end_its_text_where_the_grammar_may_end() -> None:
    """Check rows that share a grammar and have different end tokens."""
    grammar = specjax.Regex("(a|d)(a|d|f){2,12}")
    ends = [(END,), (1, END), (6, 7), ()]
    with engine(pages=32) as served:  # four rows at a time
        handles = [
            served.submit(
                PROMPTS[row],
                max_new_tokens=NEW,
                seed=row,
                temperature=1.5,
                eos_token_ids=ends[row % 4],
                grammar=grammar,
            )
            for row in range(8)
        ]
        texts = [list(handle.result(timeout=60).tokens) for handle in handles]
    for row, text in enumerate(texts):
        oracle = Oracle(models()[0], compiler(), grammar, ends[row % 4], temperature=1.5)
        key = jax.random.fold_in(make_key(row), np.uint32(0))
        whole = oracle.text(PROMPTS[row], key, 13 if not ends[row % 4] else NEW)
        assert text == whole, row
        assert handles[row].grammar_completed and handles[row].finish_reason == "stop"
