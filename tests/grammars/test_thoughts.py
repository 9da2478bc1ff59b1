"""The matcher of a thinking budget, against a search of the whole text."""

import numpy as np
import pytest

import specjax
from specjax.errors import InputError
from specjax.grammars import BudgetMatcher, GrammarCompiler, ThinkingBudget, ThoughtTokens
from specjax.grammars.matcher import mask_words
from tests.grammars.thinking_oracle import forced_token, thought_of
from tests.grammars.tokenizers_for_tests import small_tokenizer

STOP = 4
SEQUENCES = [(0,), (1,), (0, 1), (0, 0), (1, 0, 1), (0, 0, 1), (1, 1, 0, 1)]


def legal_bits(words: np.ndarray, vocab_size: int) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()


def random_law(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    begin, end = (SEQUENCES[index] for index in rng.integers(0, len(SEQUENCES), 2))
    return begin, end, int(rng.integers(0, 5))


def follow(law: tuple, prompt: list[int], length: int, rng: np.random.Generator) -> list[int]:
    """Return a random output that the oracle allows."""
    output: list[int] = []
    while len(output) < length:
        token = forced_token(prompt, output, *law)
        output.append(int(rng.integers(0, 3)) if token is None else token)
    return output


@pytest.mark.parametrize("seed", range(60))
def test_masks_along_random_texts_and_trees_are_the_oracles(seed) -> None:
    """Check masks, forced and free tokens, and the count of legal ones, at every position."""
    rng = np.random.default_rng(seed)
    law, vocab_size = random_law(rng), 40
    prompt = rng.integers(0, 3, int(rng.integers(1, 5))).tolist()
    thought = ThoughtTokens(law[0], law[1])
    matcher = BudgetMatcher(thought, law[2], prompt, vocab_size, (STOP,))
    output: list[int] = []
    for token in follow(law, prompt, 40, rng):
        forced = forced_token(prompt, output, *law)
        assert legal_bits(matcher.mask(), vocab_size) == (
            list(range(vocab_size)) if forced is None else [forced]
        )
        assert matcher.state.is_inside == thought_of(prompt, output, *law[:2])[0]
        free, drafted = matcher.free_tokens, rng.integers(0, 3, 12).tolist()
        # Free tokens are legal whatever they are; what is drafted is legal up to the first that
        # the oracle does not allow.
        legal = 0
        while legal < 12 and forced_token(prompt, [*output, *drafted[:legal]], *law) in (
            None,
            drafted[legal],
        ):
            legal += 1
        assert matcher.count_legal(drafted) == legal >= min(free, 12)
        assert (free == 0) == (forced is not None)
        host_tokens = matcher.forced(most=2)
        expected = []
        while len(expected) < 2:
            next_token = forced_token(prompt, [*output, *expected], *law)
            if next_token is None:
                break
            expected.append(next_token)
        # After the end a thought may begin at once, and have no budget: that is not drafted.
        assert host_tokens == expected[: len(host_tokens)]
        assert bool(host_tokens) == bool(expected)
        check_tree(matcher, law, prompt, output, rng)
        matcher.append([token])
        output.append(token)


def check_tree(matcher, law, prompt, output, rng) -> None:
    """Check the masks of a random tree, in which siblings have different paths."""
    nodes, vocab_size = 10, 40
    tokens = [0, *rng.choice([0, 1, 2, STOP], nodes - 1, p=[0.4, 0.4, 0.15, 0.05]).tolist()]
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    drafted = [True, *(rng.random(nodes - 1) < 0.9).tolist()]
    masks, illegal = matcher.masks(tokens, parents, drafted)
    paths: dict[int, list[int] | None] = {0: []}
    expected_illegal = 0
    for node in range(nodes):
        if node:
            above = paths[parents[node]]
            paths[node] = None
            if above is None or not drafted[node]:
                continue
            forced = forced_token(prompt, [*output, *above], *law)
            if forced not in (None, tokens[node]):
                expected_illegal += 1
                continue
            if tokens[node] == STOP:
                continue
            paths[node] = [*above, tokens[node]]
        forced = forced_token(prompt, [*output, *(paths[node] or [])], *law)
        assert legal_bits(masks[node], vocab_size) == (
            list(range(vocab_size)) if forced is None else [forced]
        )
    assert illegal == expected_illegal


def test_an_end_that_is_half_written_is_continued() -> None:
    matcher = BudgetMatcher(ThoughtTokens((7,), (1, 1, 2)), 3, [7], 16)
    matcher.append([5, 1, 1])
    assert matcher.forced(8) == [2]
    matcher.append([2])
    assert not matcher.state.is_inside and matcher.forced(8) == []


def test_after_a_stop_token_nothing_is_legal_and_nothing_forced() -> None:
    matcher = BudgetMatcher(ThoughtTokens((7,), (8,)), 1, [7], 16, (STOP,))
    matcher.append([STOP])
    assert matcher.is_over and not matcher.is_stuck
    assert matcher.forced(8) == [] and matcher.count_legal([8]) == 0 and matcher.free_tokens == 0
    masks, illegal = matcher.masks([STOP, 8], [-1, 0], [True, True])
    assert illegal == 0 and masks.shape == (2, mask_words(16))


def test_a_token_that_is_not_legal_is_an_error() -> None:
    matcher = BudgetMatcher(ThoughtTokens((7,), (8,)), 0, [7], 16)
    with pytest.raises(RuntimeError, match="token 5 is not legal: the thought must end"):
        matcher.append([5])


@pytest.mark.parametrize("seed", range(8))
def test_a_grammar_and_a_budget_allow_what_both_allow(seed) -> None:
    """Check masks of trees against a matcher of the grammar alone and one of the budget alone."""
    rng = np.random.default_rng(seed)
    compiled = GrammarCompiler(small_tokenizer(), 20).compile(specjax.Regex("([abcde]|f)*"))
    thought, words = ThoughtTokens((0,), (5,)), []
    both = BudgetMatcher(thought, 2, [1], 20, (19,), compiled.matcher((19,)))
    grammar, budget = compiled.matcher((19,)), BudgetMatcher(thought, 2, [1], 20, (19,))
    assert both.has_grammar and not budget.has_grammar and both.free_tokens == 0
    for _ in range(30):
        words = legal_bits(both.mask() & grammar.mask() & budget.mask(), 20)
        assert words == legal_bits(both.mask(), 20)
        tokens = rng.integers(0, 20, 6).tolist()
        at_nodes = [
            it.masks(tokens, [-1, 0, 0, 1, 2, 3], [True] * 6)[0][0]
            for it in (both, grammar, budget)
        ]
        assert np.array_equal(at_nodes[0], at_nodes[1] & at_nodes[2])
        assert both.count_legal(tokens) == min(
            grammar.count_legal(tokens), budget.count_legal(tokens)
        )
        assert not both.is_stuck
        token = int(rng.choice([word for word in words if word != 19]))
        for matcher in (both, grammar, budget):
            matcher.append([token])
    assert both.is_complete == grammar.is_complete


def test_a_budget_against_a_grammar_is_stuck_and_says_so() -> None:
    compiled = GrammarCompiler(small_tokenizer(), 20).compile(specjax.Regex("a{3,9}"))
    matcher = BudgetMatcher(ThoughtTokens((0,), (5,)), 1, [1], 20, (19,), compiled.matcher((19,)))
    matcher.append([0])
    assert not matcher.is_stuck
    matcher.append([0])
    assert matcher.is_stuck and not matcher.mask().any()
    error = matcher.stuck_error([3])
    assert "thinking_budget: row 3 cannot go on: token 5" in str(error)
    assert "grammar" in str(error)


def test_the_prompts_last_answer_decides_whether_it_opens_a_thought() -> None:
    thought = ThoughtTokens((7,), (8,), answer_ids=(1, 2))
    for prompt, is_inside in (
        ([1, 2, 7, 9], True),
        ([1, 2, 7, 9, 8], False),
        ([7, 9, 1, 2], False),
        ([1, 2, 7, 5, 1, 2, 3], False),
        ([1, 2, 8, 1, 2, 7], True),
        ([7, 9], True),  # there is no beginning of an answer
        ([1, 7, 2], True),
        ([5], False),
    ):
        state = thought.start(prompt)
        assert (state.is_inside, state.count) == (is_inside, 0), prompt


def test_wrong_tokens_are_refused_by_name() -> None:
    for begin, end, message in (
        ((), (8,), r"begin_ids=\(\): give at least one"),
        ((7,), (), r"end_ids=\(\): give at least one"),
        ("ab", (8,), "begin_ids='ab': give a sequence of token ids"),
        ((7,), (-8,), r"end_ids=\(-8,\): give a sequence of token ids"),
    ):
        with pytest.raises(InputError, match=message):
            ThoughtTokens(begin, end)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"thought_tokens=\('<think>',\): give the two texts"):
        ThinkingBudget(1, ("<think>",))  # pyright: ignore[reportArgumentType]


def test_a_banned_end_is_refused() -> None:
    budget, bias = ThinkingBudget(3, ThoughtTokens((7,), (8, 9))), np.zeros(16)
    budget.check_can_end(bias, [[9, 2]])
    with pytest.raises(
        InputError, match="thinking_budget=3: token 9, which ends a thought, may be"
    ):
        budget.check_can_end(bias, [[2, 9]])
    bias[8] = -np.inf
    with pytest.raises(
        InputError, match="thinking_budget=3: token 8, which ends a thought, may be"
    ):
        budget.check_can_end(bias, [])
