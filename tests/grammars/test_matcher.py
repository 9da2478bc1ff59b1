"""The masks of a matcher, compared with llguidance's own, one text and one token at a time."""

import itertools

import numpy as np
import pytest
from llguidance import LLMatcher

import specjax
from specjax import text
from specjax.errors import GrammarLimitError, InputError
from specjax.grammars import GrammarCompiler, Matcher, check_process, matcher
from specjax.grammars import compiler as compiler_module
from specjax.models import hub
from tests.grammars.test_hostile import AMBIGUOUS
from tests.grammars.tokenizers_for_tests import small_tokenizer

VOCABULARY, END = 20, 19
GRAMMARS = [
    specjax.Regex("(ab|abc|de)*f?"),
    specjax.Choice(["abc", "abde", "d", "dab"]),
    specjax.Lark('start: "{" start "}" | ("a" | "bc")+ | ":"'),
    specjax.JsonSchema(
        {
            "type": "object",
            "properties": {"ab": {"enum": [0, 1, 10]}, "de": {"type": "integer"}},
            "required": ["ab", "de"],
            "additionalProperties": False,
        },
        whitespace=False,
    ),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer(), VOCABULARY)


def flags(words: np.ndarray, count: int = VOCABULARY) -> np.ndarray:
    """Return ``[..., V]`` bool for the words of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :count].astype(bool)


def legal_after(compiler, grammar, tokens) -> np.ndarray:
    """Return ``[V]`` bool: a fresh matcher reads the tokens and is asked for its mask."""
    matcher = LLMatcher(compiler._tokenizer, grammar.source)
    assert not tokens or matcher.consume_tokens(tokens)
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    return flags(words)


def random_walk(compiler, grammar, rng, length: int = 12) -> list[int]:
    """Return legal tokens, drawn at random, without the end."""
    tokens: list[int] = []
    while len(tokens) < length:
        legal = legal_after(compiler, grammar, tokens)
        legal[END] = False
        if not legal.any():
            break
        tokens.append(int(rng.choice(np.flatnonzero(legal))))
    return tokens


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: type(grammar).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_a_tree_equal_those_of_fresh_matchers(compiler, grammar, seed) -> None:
    rng = np.random.default_rng(seed)
    text = random_walk(compiler, grammar, rng)
    start = int(rng.integers(0, len(text) + 1))
    matcher = compiler.compile(grammar).matcher((END,))
    matcher.append(text[:start])
    tokens, parents = [0], [-1]
    for _ in range(24):
        parent = int(rng.integers(0, len(tokens)))
        path = path_to(parent, tokens, parents)
        following = text[start + len(path) : start + len(path) + 1]
        is_on_text = following and rng.random() < 0.5
        tokens.append(following[0] if is_on_text else int(rng.integers(0, VOCABULARY)))
        parents.append(parent)
    drafted = rng.random(len(tokens)) < 0.9
    masks, illegal = matcher.masks(tokens, parents, drafted)
    illegal_nodes = 0
    for node in range(len(tokens)):
        nodes = nodes_to(node, parents)
        prefix, is_reached = list(text[:start]), all(drafted[n] for n in nodes)
        for n in nodes:
            if not is_reached:
                break
            is_legal = legal_after(compiler, grammar, prefix)[tokens[n]]
            illegal_nodes += n == node and not is_legal
            is_reached = is_legal and tokens[n] != END
            prefix.append(tokens[n])
        if is_reached:
            assert (flags(masks[node]) == legal_after(compiler, grammar, prefix)).all()
    assert illegal == illegal_nodes
    # The walk leaves the matcher where it was.
    assert (flags(matcher.mask()) == legal_after(compiler, grammar, text[:start])).all()


def nodes_to(node: int, parents: list[int]) -> list[int]:
    """Return the nodes from below the root to ``node``."""
    nodes = []
    while node > 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return [tokens[n] for n in nodes_to(node, parents)]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: type(grammar).__name__)
def test_forced_tokens_are_the_only_legal_ones(compiler, grammar) -> None:
    """Check along random walks that each forced token is legal, and the one legal token there."""
    rng, forced_tokens = np.random.default_rng(1), 0
    for _ in range(8):
        text = random_walk(compiler, grammar, rng)
        for end in range(len(text) + 1):
            matcher = compiler.compile(grammar).matcher((END,))
            matcher.append(text[:end])
            forced = matcher.forced(8)
            forced_tokens += len(forced)
            for index, token in enumerate(forced):
                legal = legal_after(compiler, grammar, text[:end] + forced[:index])
                assert np.flatnonzero(legal).tolist() == [token]
            assert flags(matcher.mask()).any()  # asking changes nothing
            assert (flags(matcher.mask()) == legal_after(compiler, grammar, text[:end])).all()
    assert forced_tokens > 0 or isinstance(grammar, specjax.Regex)


def test_a_matcher_takes_tokenizations_that_its_mask_does_not(compiler) -> None:
    """Show why a draft is judged by masks: validation accepts what a forced position excludes."""
    matcher = LLMatcher(compiler._tokenizer, specjax.Choice(["abc"]).source)
    letters = [0, 1, 2]
    assert matcher.validate_tokens(letters) == 3
    masks, illegal = (
        compiler.compile(specjax.Choice(["abc"])).matcher((END,)).masks([0, 0], [-1, 0], [True] * 2)
    )
    assert illegal == 1
    assert flags(masks[0]).sum() == 1


def test_a_committed_token_is_consumed_once(compiler) -> None:
    grammar = specjax.Regex("a{2}bc")
    matcher = compiler.compile(grammar).matcher((END,))
    matcher.append([0])
    assert np.array_equal(flags(matcher.mask()), legal_after(compiler, grammar, [0]))


@pytest.mark.parametrize("vocabulary", [20, 32, 33, 64])
def test_a_mask_has_a_bit_for_each_token(vocabulary) -> None:
    matcher = GrammarCompiler(small_tokenizer(), vocabulary).compile(GRAMMARS[0]).matcher((END,))
    assert matcher.mask().shape == (-(-vocabulary // 32),)


def test_a_texts_own_stop_tokens_are_legal_where_it_may_end(compiler) -> None:
    grammar = compiler.compile(specjax.Regex("d(ab)?"))
    d, f, ab = 3, 5, 14
    matcher = grammar.matcher((f,))  # a letter that the grammar has nowhere
    assert not flags(matcher.mask())[[f, END]].any()
    matcher.append([d])
    assert flags(matcher.mask())[[f, ab]].all() and not flags(matcher.mask())[END]
    assert matcher.is_complete and not matcher.is_over
    matcher.append([f, ab])  # tokens after the stop token do not count
    assert matcher.is_over and matcher.is_complete
    without_end = grammar.matcher(())
    without_end.append([d])
    assert not flags(without_end.mask())[[f, END]].any()
    without_end.append([ab])
    assert without_end.is_over  # nothing can follow


def test_a_token_that_is_not_legal_is_an_error(compiler) -> None:
    matcher = compiler.compile(specjax.Regex("d+")).matcher((END,))
    with pytest.raises(RuntimeError, match="token 0 is not legal"):
        matcher.append([0])


def test_errors_that_are_no_limits_do_not_name_one(compiler) -> None:
    text = compiler.compile(specjax.Regex("ab")).matcher((END,))
    text._matcher.consume_token(300)
    with pytest.raises(InputError, match=r"its grammar fails here .*token id 300 out of range"):
        text.mask()
    text = compiler.compile(specjax.Regex("ab")).matcher((END,))
    text._matcher.consume_token(300)
    with pytest.raises(InputError) as failed:
        text.append([0])
    assert not isinstance(failed.value, GrammarLimitError)


STATES = specjax.Regex("(a|b)*a(a|b){12}c")


@pytest.mark.parametrize(
    ("limit", "value", "grammar"),
    [
        ("max_items_in_row", 40, AMBIGUOUS),
        ("step_max_items", 60, AMBIGUOUS),
        ("max_lexer_states", 30, STATES),
        ("step_lexer_fuel", 100, STATES),
    ],
)
def test_the_error_of_a_limit_names_it(monkeypatch, limit, value, grammar) -> None:
    """Check the limits of llguidance one by one."""
    largest = dict.fromkeys(check_process.ROW_LIMITS, 2**31 - 1) | {"verbose_errors": False}
    monkeypatch.setattr(compiler_module, "ROW_LIMITS", largest | {limit: value})
    compiler = GrammarCompiler(small_tokenizer(), VOCABULARY)
    text = compiler.compile(grammar, is_bounded=True).matcher((END,))
    letters = [compiler._tokenizer.tokenize_str(letter)[0] for letter in "ab"]
    rng = np.random.default_rng(0)
    with pytest.raises(GrammarLimitError, match="its masks take too long"):
        for token in rng.choice(letters, 60):
            text.mask()
            text.append([token])


def test_tokens_of_others_must_be_those_of_the_masks(compiler) -> None:
    """Check that forced text in odd tokens is no text of the engine, which `append` takes."""
    grammar = specjax.Choice(["abc"])
    canonical = compiler.compile(grammar).matcher((END,)).forced(8)[:-1]
    a, b, c = (compiler._tokenizer.tokenize_str(letter)[0] for letter in "abc")
    assert canonical != [a, b, c]
    text = compiler.compile(grammar).matcher((END,))
    text.read(canonical)
    assert text.is_complete
    compiler.compile(grammar).matcher((END,)).append([a, b, c])
    with pytest.raises(RuntimeError, match=f"token {a} is not legal"):
        compiler.compile(grammar).matcher((END,)).read([a, b, c])
    rng = np.random.default_rng(5)
    for grammar in GRAMMARS:
        compiler.compile(grammar).matcher((END,)).read(random_walk(compiler, grammar, rng))


def test_reading_the_tokens_of_others_takes_bounded_time(compiler, monkeypatch) -> None:
    text = compiler.compile(specjax.Regex("a*")).matcher((END,))
    (a,) = compiler._tokenizer.tokenize_str("a")
    clock = itertools.count(0.0, matcher.EXTRA_SECONDS / 10)
    monkeypatch.setattr(matcher.time, "thread_time", lambda: next(clock))
    with pytest.raises(GrammarLimitError, match="for 10 tokens"):
        text.read([a] * 30)


def test_bytes_without_a_token_stop_a_text(compiler) -> None:
    """Check a tokenizer without brackets: no token is legal, where llguidance names wrong ones."""
    assert compiler._lacks_bytes
    matcher = compiler.compile(specjax.Regex(r"d\[0")).matcher((END,))
    matcher.append([3])
    assert not flags(matcher.mask()).any() and matcher.is_stuck
    whole = GrammarCompiler(specjax.load("embedded").tokenizer, 3072)
    assert not whole._lacks_bytes


def test_a_stop_token_that_the_grammar_needs_stops_a_text(compiler) -> None:
    matcher = compiler.compile(specjax.Regex("d+f")).matcher((5, END))
    matcher.append([3])
    assert flags(matcher.mask()).any() and not matcher.is_stuck
    forced = compiler.compile(specjax.Choice(["df"])).matcher((5, END))
    forced.append([3])
    assert forced.is_stuck


@pytest.mark.full
@pytest.mark.parametrize(
    "grammar",
    [*GRAMMARS, specjax.After("ab", specjax.Regex("[a-f]{2,3}:"))],
    ids=lambda grammar: type(grammar).__name__,
)
def test_the_legal_tokens_of_a_text_are_those_in_the_mask_of_their_position(
    compiler, grammar
) -> None:
    """Check every token after each part of a text, and texts with one token replaced."""
    rng, compiled = np.random.default_rng(0), compiler.compile(grammar)

    def after(tokens: list[int]) -> np.ndarray:
        matcher = compiled.matcher((END,))
        matcher.append(tokens)
        return flags(matcher.mask())

    legal_counts = set()
    for _ in range(30):
        text: list[int] = []
        while len(text) < 12 and (legal := np.flatnonzero((mask := after(text))[:END])).size:
            # Where bytes are forced, other tokenisations of them are not in the mask.
            matcher = compiled.matcher((END,))
            matcher.append(text)
            counts = [matcher.count_legal([token]) for token in range(VOCABULARY)]
            assert np.array_equal(mask, np.array(counts, bool))
            text.append(int(rng.choice(legal)))
        length = len(text)
        text += [END, 0]
        wrong = int(rng.integers(0, len(text)))
        text[wrong] = int(rng.integers(0, VOCABULARY))
        start = int(rng.integers(0, min(wrong, length) + 1))
        expected = 0
        for position in range(start, len(text)):
            if not after(text[:position])[text[position]]:
                break
            expected += 1
            if text[position] == END:
                break
        matcher = compiled.matcher((END,))
        matcher.append(text[:start])
        assert matcher.count_legal(text[start:]) == expected
        assert np.array_equal(flags(matcher.mask()), after(text[:start]))
        legal_counts.add(expected)
    assert len(legal_counts) > 2


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: type(grammar).__name__)
def test_a_token_that_the_tokenizer_does_not_know_is_not_counted_as_legal(grammar) -> None:
    compiled = GrammarCompiler(small_tokenizer(), 2 * VOCABULARY).compile(grammar)
    mask = flags(compiled.matcher((END,)).mask(), 2 * VOCABULARY)
    counts = [compiled.matcher((END,)).count_legal([token]) for token in range(2 * VOCABULARY)]
    assert np.array_equal(mask, np.array(counts, bool))
    assert not mask[VOCABULARY:].any()


@pytest.mark.full_except("Choice")
@pytest.mark.parametrize(
    "grammar",
    [GRAMMARS[3], specjax.Choice(["function", "functional", "finally"]), specjax.JsonObject()],
    ids=lambda grammar: type(grammar).__name__,
)
def test_forced_bytes_count_as_legal_in_their_canonical_tokens_alone(grammar) -> None:
    """Check every token of a tokenizer that has all bytes, after each part of some texts."""
    tokenizer = text.load_tokenizer(hub.locate("embedded", weights=False))
    end, vocabulary = tokenizer.eos_token_id, 3072
    compiled = GrammarCompiler(tokenizer, vocabulary).compile(grammar)
    rng, excluded = np.random.default_rng(0), 0
    for _ in range(4):
        matcher = compiled.matcher((end,))
        for _ in range(8):
            mask = flags(matcher.mask(), vocabulary)
            counts = [matcher.count_legal([token]) for token in range(vocabulary)]
            assert np.array_equal(mask, np.array(counts, bool))
            takes = np.array([matcher._takes(token) for token in range(vocabulary)])
            mask[end] = takes[end] = False
            excluded += int((takes & ~mask).sum())
            if not mask.any():
                break
            matcher.append([int(rng.choice(np.flatnonzero(mask)))])
    assert excluded or isinstance(grammar, specjax.JsonObject)  # which forces little


def test_a_matchers_time_counts_once_and_as_a_whole(compiler, monkeypatch) -> None:
    """Check what the time of a check of tokens and of a mask that is validated holds."""
    ticks = itertools.count()
    read: list[float] = []

    def thread_time() -> float:
        read.append(next(ticks) / 2**20)
        return read[-1]

    text = compiler.compile(specjax.Choice(["abc"])).matcher((END,))
    forced = text.forced(8)
    before = text.seconds
    monkeypatch.setattr(matcher.time, "thread_time", thread_time)
    assert text.count_legal(forced) == len(forced)
    assert len(read) > 2  # masks were made
    assert text.seconds - before == pytest.approx(read[-1] - read[0])
    # Where the tokenizer lacks bytes, the check of the mask's tokens is most of its time.
    takes = Matcher._takes

    def slow_takes(self: Matcher, token: int) -> bool:
        next(ticks)
        return takes(self, token)

    monkeypatch.setattr(Matcher, "_takes", slow_takes)
    text = compiler.compile(specjax.Regex("[a-e]")).matcher((END,))
    text._validates = True
    legal = np.unpackbits(text.mask().view(np.uint8)).sum()
    assert text.seconds * 2**20 == 1 + legal > 2


def test_a_check_that_takes_long_ends_early_and_ends_no_text(compiler, monkeypatch) -> None:
    text = compiler.compile(specjax.Regex("[ab]*")).matcher((END,))
    tokens = random_walk(compiler, specjax.Regex("[ab]*"), np.random.default_rng(0), 12)
    assert text.count_legal(tokens) == len(tokens) == 12
    clock = itertools.count(0.0, matcher.STEP_SECONDS / 10)
    monkeypatch.setattr(matcher.time, "thread_time", lambda: next(clock))
    text.begin_step()
    assert 0 < text.count_legal(tokens) < 5
    assert flags(text.mask())[tokens[0]]  # the position is what it was
