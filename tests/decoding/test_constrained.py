"""Constrained texts: those of a slow oracle, with the exact distribution, for every drafter."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import sampling
from specjax.decoding import verification
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree
from specjax.errors import GrammarError
from specjax.evaluation.conformance import FALSE_ALARM, g_test
from specjax.grammars import GrammarCompiler, Matcher
from tests.conftest import compilations, tiny_target
from tests.grammars.oracle import Oracle
from tests.grammars.oracle import constrained as law
from tests.grammars.tokenizers_for_tests import small_tokenizer

VOCABULARY, END, NEW = 20, 19, 24
INNER = {"type": "object", "properties": {"f": {"enum": ["abc", "f", 0]}}, "required": ["f"]}
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "de": INNER | {"additionalProperties": False}},
    "required": ["ab", "de"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": specjax.JsonSchema(SCHEMA, whitespace=False),
    "regex": specjax.Regex("(ab|abc|de){2,6}f?"),
    "choice": specjax.Choice(["abcabcde", "abdeabde", "d01d01"]),
    "lark": specjax.Lark('start: "{" start "}" | ("a" | "bc")+ ":"'),
    "anything": specjax.Regex("(?s).*"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.5, "top_k": 3},
    "nucleus": {"temperature": 0.7, "top_p": 0.5},
    "min_p": {"min_p": 0.3},
}
PROMPTS = np.random.default_rng(0).integers(0, VOCABULARY - 1, (len(GRAMMARS), 6))


@cache
def models() -> tuple[Any, Any]:
    """Return a target and a draft model, both of random weights."""
    return (
        tiny_target(vocab_size=VOCABULARY),
        tiny_target(seed=5, num_layers=1, vocab_size=VOCABULARY),
    )


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer(), VOCABULARY)


DRAFTERS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda target, model: None,
    "prompt lookup": lambda target, model: PromptLookup(draft=3),
    "the target itself": lambda target, model: DraftModel(target, draft=Chain(4)),
    "chain": lambda target, model: DraftModel(model, draft=Chain(3)),
    "dynamic tree": lambda target, model: DraftModel(
        model, draft=DynamicTree(top_k=3, depth=3, nodes=8)
    ),
    "static tree": lambda target, model: DraftModel(
        model, draft=StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    ),
    "sampled tree": lambda target, model: DraftModel(model, draft=SampledTree((2, 2))),
    "EAGLE-3 of few tokens": lambda target, model: specjax.Eagle3.init(
        target, jax.random.key(5), draft=Chain(3), ids=np.arange(0, target.config.vocab_size, 2)
    ),
}


def generate(drafter: str, **options: Any) -> Any:
    target, model = models()
    grammars = [compiler().compile(grammar) for grammar in GRAMMARS.values()]
    return specjax.generate(
        target,
        DRAFTERS[drafter](target, model),
        PROMPTS,
        **{
            "grammar": grammars,
            "max_new_tokens": NEW,
            "eos_token_ids": (END,),
            "key": jax.random.key(3),
        }
        | options,
    )


@cache
def expected(setting: str) -> list[list[int]]:
    """Return the oracle's output for each grammar."""
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(3), row))(
        jnp.arange(len(PROMPTS))
    )
    return [
        Oracle(models()[0], compiler(), grammar, (END,), **SETTINGS[setting]).text(
            PROMPTS[row].tolist(),
            keys[row],
            NEW,
        )
        for row, grammar in enumerate(GRAMMARS.values())
    ]


def outputs(result: Any) -> list[list[int]]:
    return [
        row[PROMPTS.shape[1] : length].tolist()
        for row, length in zip(result.tokens, result.lengths, strict=True)
    ]


MARKS = {
    ("chain", "plain"): pytest.mark.represents("constrained texts under coupled sampling"),
    ("chain", "nucleus"): pytest.mark.full,
    ("dynamic tree", "min_p"): pytest.mark.full,
    ("dynamic tree", "nucleus"): pytest.mark.full,
    ("prompt lookup", "plain"): pytest.mark.full,
    ("EAGLE-3 of few tokens", "hot"): pytest.mark.full,
}


@pytest.mark.parametrize(
    ("drafter", "setting"),
    [
        pytest.param(*case, marks=MARKS.get(case, pytest.mark.thorough))
        for case in product(DRAFTERS, SETTINGS)
    ],
)
def test_every_text_is_the_oracles(drafter, setting) -> None:
    """Check outputs, their ends, and what is reported as complete, for five grammars at once."""
    result = generate(drafter, sampling=specjax.Sampling(**SETTINGS[setting]))
    texts = outputs(result)
    assert texts == expected(setting)
    for text, completed, grammar in zip(
        texts, result.grammar_completed, GRAMMARS.values(), strict=True
    ):
        matcher = compiler().compile(grammar).matcher((END,))
        matcher.append(text)
        assert matcher.is_complete == completed
        assert completed or len(text) == NEW


@pytest.mark.full
def test_greedy_rows_and_rows_without_a_grammar_stay_what_they_are() -> None:
    """Check that a row without a grammar has its free text beside constrained rows."""
    free = generate("chain", grammar=None, sampling=specjax.Sampling(), rule="coupled")
    grammars = [None, *(compiler().compile(grammar) for grammar in list(GRAMMARS.values())[1:])]
    mixed = generate("chain", grammar=grammars, sampling=specjax.Sampling())
    assert outputs(mixed)[0] == outputs(free)[0]
    assert outputs(mixed)[1:] == expected("plain")[1:]
    assert mixed.grammar_completed[0]


@pytest.mark.full
def test_a_stream_gives_the_same_text_and_a_second_call_compiles_nothing() -> None:
    target, model = models()
    grammar = compiler().compile(GRAMMARS["schema"])
    options = {"grammar": grammar, "max_new_tokens": NEW, "eos_token_ids": (END,)}
    drafter = DRAFTERS["chain"](target, model)
    whole = specjax.generate(target, drafter, PROMPTS, **options)
    parts = list(specjax.stream(target, drafter, PROMPTS, steps=2, **options))
    before = compilations()
    assert np.array_equal(parts[-1].tokens, whole.tokens)
    assert all((b.lengths >= a.lengths).all() for a, b in pairwise(parts))
    regex = compiler().compile(GRAMMARS["regex"])
    specjax.generate(target, drafter, PROMPTS[::-1].copy(), **options | {"grammar": regex})
    assert compilations() == before


@pytest.mark.full
def test_a_row_that_no_token_ends_ends_with_its_grammar() -> None:
    result = generate("chain", eos_token_ids=(), grammar=compiler().compile(GRAMMARS["choice"]))
    decoded = [small_tokenizer().decode(text) for text in outputs(result)]
    assert set(decoded) <= {"abcabcde", "abdeabde", "d01d01"}
    assert result.grammar_completed.all()


@pytest.mark.full
def test_a_text_that_cannot_go_on_is_an_error() -> None:
    grammar = compiler().compile(specjax.Choice(["df", "dab"]))
    free = [None] * (len(PROMPTS) - 1)
    with pytest.raises(GrammarError, match="row 0 cannot go on: the next token must be") as caught:
        generate("chain", grammar=[grammar, *free], eos_token_ids=(5, 14, 0, END))
    assert caught.value.rows == (0,)
    expected_texts = generate("chain", grammar=None, eos_token_ids=(5, 14, 0, END), rule="coupled")
    assert outputs(caught.value.result)[1:] == outputs(expected_texts)[1:]


def test_the_end_comes_where_nothing_else_is_legal_whatever_min_new_tokens_says() -> None:
    grammar = compiler().compile(specjax.Regex("d(ab)*|f"))
    result = generate("chain", grammar=grammar, min_new_tokens=6)
    for text in outputs(result):
        assert text == [5, END] or len(text) >= 6


@pytest.mark.full
def test_forced_tokens_are_drafted() -> None:
    """Check that a schema takes fewer steps than tokens although nothing else is drafted."""
    schema = specjax.JsonSchema(SCHEMA, whitespace=False)
    result = generate("none", grammar=compiler().compile(schema))
    tokens = result.lengths - PROMPTS.shape[1]
    assert (result.stats.steps < tokens).all()


# --- the distribution -----------------------------------------------------------------------------

RULES: dict[str, tuple[str, str]] = {
    "block": ("chain", "block"),
    "rejection": ("chain", "rejection"),
    "siblings": ("sampled tree", "independent"),
    "matching": ("dynamic tree", "independent"),
    "coupled": ("chain", "coupled"),
}
FINITE = specjax.Regex("(a|ab|abc|de){1,2}(0|01|1)?")
FORCED = specjax.Choice(["abcabc", "deabc", "f01d"])


def p_value(
    rule: str, setting: str, draws: int = 6_000, grammar: specjax.grammars.Grammar = FINITE
) -> float:
    """Return the p-value of a G-test of whole texts against the enumerated language."""
    target, model = models()
    drafter, rule = DRAFTERS[RULES[rule][0]](target, model), RULES[rule][1]
    prompt, length = PROMPTS[0], 4
    oracle = Oracle(target, compiler(), grammar, (END,), **SETTINGS[setting])
    language = dict(oracle.language(prompt.tolist(), length))
    texts = list(language)
    result = specjax.generate(
        target,
        drafter,
        np.tile(prompt, (draws, 1)),
        max_new_tokens=length,
        sampling=specjax.Sampling(**SETTINGS[setting]),
        eos_token_ids=(END,),
        key=jax.random.key(8),
        rule=rule,
        grammar=compiler().compile(grammar),
    )
    counts = np.zeros(len(texts) + 1)
    order = {text: index for index, text in enumerate(texts)}
    for row, end in zip(result.tokens[:, len(prompt) :], result.lengths - len(prompt), strict=True):
        counts[order.get(tuple(row[:end].tolist()), len(texts))] += 1
    return g_test(counts, np.array([*language.values(), 0.0]))


@pytest.mark.full
@pytest.mark.thorough_except("block-plain")
@pytest.mark.parametrize("setting", ["plain", "nucleus"])
@pytest.mark.parametrize("rule", list(RULES))
def test_the_distribution_is_that_of_the_law(rule, setting) -> None:
    assert p_value(rule, setting) >= FALSE_ALARM


@pytest.mark.full
def test_forced_text_has_its_canonical_tokens() -> None:
    assert p_value("coupled", "plain", 2_000, FORCED) >= FALSE_ALARM


def _masks_of_parents(write_masks: Callable) -> Callable:
    def late(self, masks, tokens, parents, drafted):
        illegal = write_masks(self, masks, tokens, parents, drafted)
        masks[:] = masks[[max(parent, 0) for parent in parents]]
        return illegal

    return late


def _masks_of_children(write_masks: Callable) -> Callable:
    def early(self, masks, tokens, parents, drafted):
        illegal = write_masks(self, masks, tokens, parents, drafted)
        masks[:] = np.concatenate([masks[1:], masks[:1]])
        return illegal

    return early


def _appended_twice(append: Callable) -> Callable:
    def twice(self, tokens):
        for token in tokens:
            append(self, [token])
            if not self._has_ended:
                self._matcher.try_consume_tokens([token])

    return twice


def _every_tokenization(write_mask: Callable) -> Callable:
    def wide(self, masks, node):
        flags = np.zeros(masks.shape[1] * 32, bool)
        for token in range(VOCABULARY):
            if token != END and self._matcher.try_consume_tokens([token]) == 1:
                flags[token] = True
                self._matcher.rollback(1)
        write_mask(self, masks, node)
        masks[node] |= np.packbits(flags, bitorder="little").view(np.uint32)

    return wide


def _siblings_as_a_chain(write_masks: Callable) -> Callable:
    def chain(self, masks, tokens, parents, drafted):
        return write_masks(self, masks, tokens, list(range(-1, len(tokens) - 1)), drafted)

    return chain


def _nothing_beyond_truncation(logits, settings, legal):
    scaled = sampling._scaled(logits, settings)
    is_kept = sampling._is_kept(scaled, settings) if settings.truncated else True
    return jnp.where(is_kept & legal, scaled, jnp.where(legal, -1e30, -jnp.inf))


BREAKS: dict[str, tuple[Any, str, Callable, str, str]] = {
    "masks one position late": (Matcher, "write_masks", _masks_of_parents, "coupled", "plain"),
    "masks one position early": (Matcher, "write_masks", _masks_of_children, "coupled", "plain"),
    "a matcher that reads each token twice": (
        *(Matcher, "append", _appended_twice, "coupled"),
        "plain",
    ),
    "every tokenization of forced text": (
        *(Matcher, "_write_mask", _every_tokenization, "coupled"),
        "plain",
    ),
    "siblings masked as a chain": (
        Matcher,
        "write_masks",
        _siblings_as_a_chain,
        "matching",
        "plain",
    ),
    "nothing beyond the truncation": (
        *(sampling, "_constrained", lambda _: _nothing_beyond_truncation),
        *("coupled", "nucleus"),
    ),
}


@pytest.mark.full
@pytest.mark.thorough_except("masks one position late")
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("name", list(BREAKS))
def test_a_broken_law_is_noticed(name, monkeypatch) -> None:
    owner, attribute, broken, rule, setting = BREAKS[name]
    monkeypatch.setattr(owner, attribute, broken(getattr(owner, attribute)))
    grammar = FORCED if "forced" in name else FINITE
    try:
        assert p_value(rule, setting, 2_000, grammar) < FALSE_ALARM
    except RuntimeError as error:  # the matcher meets a token that is not legal
        assert "is not legal" in str(error)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
def test_a_greedy_maximum_over_illegal_tokens_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(verification, "only_legal", lambda logits, legal: logits)
    with pytest.raises(RuntimeError, match="is not legal"):
        generate("chain", sampling=specjax.Sampling(temperature=0.0))


# --- the law at one node --------------------------------------------------------------------------


@pytest.mark.represents("the law of constrained rows")
@pytest.mark.parametrize("mixed", [False, True])
def test_probabilities_under_a_mask_equal_the_definition(mixed) -> None:
    """Compare every sampling setting, alone and beside other rows, with the law written out."""
    rng = np.random.default_rng(2)
    settings = [
        *SETTINGS.values(),
        {"temperature": 1e-30},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.95, "min_p": 0.1},
    ]
    logits = rng.normal(size=(len(settings), 3, 12)).astype(np.float32) * 3
    legal = rng.random((len(settings), 3, 12)) < 0.3
    legal[..., 5] = True
    full = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | s for s in settings]
    for row, setting in enumerate(settings):
        if mixed:
            rows = specjax.Sampling(**{name: [s[name] for s in full] for name in full[0]})
            p = sampling.probabilities(
                jnp.asarray(logits), rows.rows(len(settings)), jnp.asarray(legal)
            )[row]
        else:
            rows = specjax.Sampling(**setting).rows(1)
            p = sampling.probabilities(
                jnp.asarray(logits[row][None]), rows, jnp.asarray(legal[row][None])
            )[0]
        for node in range(3):
            exact = law(logits[row, node], legal[row, node], setting)
            np.testing.assert_allclose(np.asarray(p[node]), exact, atol=2e-6)


@pytest.mark.full
def test_logits_far_below_the_largest_keep_their_order() -> None:
    """Check a greedy row whose legal logits differ in the last place, and lie far below another."""
    logits = jnp.array([[1e8, 1.0, 1.0000001, 0.5]])
    legal = jnp.array([[False, True, True, True]])
    for rows in (specjax.Sampling(temperature=0.0).rows(1), specjax.Sampling(top_k=2).rows(1)):
        p = sampling.probabilities(logits, rows, legal)
        assert int(jnp.argmax(p)) == 2
    mixed = specjax.sampling.GREEDY.rows_of_any_kind(1)
    chosen = sampling.argmax(sampling.perturbed(logits, mixed, jnp.zeros((1, 4)), legal=legal))
    assert chosen.tolist() == [2]
