"""Penalties, biases and banned words: texts of a slow oracle and exact distributions."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.adjustments import NO_TOKEN, Adjustments, adjusted
from specjax.decoding import verification
from specjax.drafters import candidates
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import StaticTree
from specjax.errors import InputError, LogitsError
from specjax.evaluation import conformance
from specjax.evaluation.conformance import FALSE_ALARM, g_test
from specjax.sampling import position_keys, position_noise
from specjax.token_biases import TokenBiases
from tests.conftest import compilations, tiny_target
from tests.decoding import test_constrained
from tests.grammars.oracle import truncated

VOCABULARY, NEW, ROOM = 7, 20, 32
PROMPTS = np.random.default_rng(2).integers(0, VOCABULARY, (6, 5))

# --- the oracle -----------------------------------------------------------------------------------


def oracle_logits(
    logits: np.ndarray, prompt: list[int], output: list[int], stated: dict[str, Any]
) -> np.ndarray:
    """Return float64 logits ``[V]`` after everything that a text states, token by token."""
    changed = logits.astype(np.float64)
    for token in range(len(changed)):
        count = output.count(token)
        if count or token in prompt:
            factor = stated.get("repetition_penalty", 1.0)
            changed[token] *= factor if changed[token] <= 0 else 1 / factor
        changed[token] -= stated.get("frequency_penalty", 0.0) * count
        changed[token] -= stated.get("presence_penalty", 0.0) * (count > 0)
        changed[token] += stated.get("logit_bias", {}).get(token, 0.0)
        if token not in stated.get("allowed_token_ids", range(len(changed))):
            changed[token] = -math.inf
    for *start, last in stated.get("bad_words", []):
        if not start or output[-len(start) :] == start:
            changed[last] = -math.inf
    return changed


def oracle_probabilities(logits: np.ndarray, stated: dict[str, Any]) -> np.ndarray:
    """Return p ``[V]`` of logits that `oracle_logits` has changed."""
    if stated.get("temperature", 1.0) == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    names = ("temperature", "top_k", "top_p", "min_p")
    with np.errstate(invalid="ignore"):
        return truncated(logits, {name: stated[name] for name in names if name in stated})


@cache
def models() -> tuple[Any, Any]:
    """Return a target and a draft model, both of random weights."""
    return (
        tiny_target(vocab_size=VOCABULARY),
        tiny_target(seed=5, num_layers=1, vocab_size=VOCABULARY),
    )


@cache
def next_logits(text: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, : len(text)] = text
    forward = jax.jit(type(models()[0]).forward)
    return np.array(forward(models()[0], padded)[0].logits[0, len(text) - 1])


def oracle_text(prompt: list[int], key: jax.Array, stated: dict[str, Any]) -> list[int]:
    """Return the output of coupled or greedy decoding."""
    output: list[int] = []
    for position in range(len(prompt), len(prompt) + NEW):
        logits = oracle_logits(next_logits((*prompt, *output)), prompt, output, stated)
        p = oracle_probabilities(logits, stated)
        noise = position_noise(position_keys(key[None], jnp.array([[position]])), VOCABULARY)
        with np.errstate(divide="ignore"):
            output.append(int(np.argmax(np.log(p) + np.asarray(noise[0, 0], np.float64))))
    return output


# --- texts ----------------------------------------------------------------------------------------

STATED: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.3, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {2: 3.0, 5: -100.0, 1: -math.inf}},
    "allowed": {"allowed_token_ids": [1, 3, 4, 6]},
    "words": {"bad_words": [[3], [1, 2], [2, 2, 0], [4, 4]]},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {2: 1.0},
        "allowed_token_ids": [0, 1, 2, 3, 5],
        "bad_words": [[3, 1], [2, 2]],
        "top_p": 0.9,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "truncated": {"temperature": 1.2, "top_k": 3, "min_p": 0.05},
}
DRAFTERS: dict[str, Callable[[Any, Any], Any]] = test_constrained.DRAFTERS | {
    "Medusa": lambda target, model: specjax.drafters.Medusa.init(
        target, jax.random.key(6), draft=StaticTree(((0,), (1,), (0, 0), (1, 0)))
    ),
}
BIASES = ("logit_bias", "allowed_token_ids", "bad_words")


def options(stated: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of generate for rows that state these."""
    neutral = vars(specjax.Sampling())
    return {
        "sampling": specjax.Sampling(
            **{
                name: np.array([row.get(name, value) for row in stated])
                for name, value in neutral.items()
            }
        ),
        "biases": [
            TokenBiases.of(**{name: row[name] for name in BIASES if name in row}) for row in stated
        ],
    }


def generate(
    drafter: str, rows: Sequence[dict[str, Any]], prompts: Any, **options_of_call: Any
) -> Any:
    defaults = {"max_new_tokens": NEW, "eos_token_ids": (), "key": jax.random.key(3)}
    return specjax.generate(
        models()[0],
        DRAFTERS[drafter](*models()),
        prompts,
        **(defaults | {"rule": "coupled"} | options(rows) | options_of_call),
    )


def outputs(result: Any, start: int = PROMPTS.shape[1]) -> list[list[int]]:
    return [
        row[start:length].tolist()
        for row, length in zip(result.tokens, result.lengths, strict=True)
    ]


def rows_of(setting: str) -> list[dict[str, Any]]:
    """Return the rows of one batch: each of `STATED`, and one that states nothing."""
    return [SETTINGS[setting] | stated for stated in (*STATED.values(), {})]


def prompts_of(rows: Sequence[Any]) -> np.ndarray:
    return PROMPTS[np.arange(len(rows)) % len(PROMPTS)]


@cache
def expected(setting: str) -> list[list[int]]:
    rows = rows_of(setting)
    keys = [jax.random.fold_in(jax.random.key(3), row) for row in range(len(rows))]
    return [
        oracle_text(prompt.tolist(), key, stated)
        for prompt, key, stated in zip(prompts_of(rows), keys, rows, strict=True)
    ]


@pytest.mark.full_except("dynamic tree-truncated")
@pytest.mark.thorough_except("EAGLE-3 of few tokens-greedy", "prompt lookup-drawn")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_text_is_the_oracles(drafter, setting) -> None:
    """Check all parameters at once, in rows beside one that states nothing."""
    rows = rows_of(setting)
    texts = outputs(generate(drafter, rows, prompts_of(rows)))
    assert texts == expected(setting)
    free = generate(drafter, [SETTINGS[setting]] * len(rows), prompts_of(rows))
    assert texts[-1] == outputs(free)[-1]  # and the program without any gives its text
    differing = [index for index in range(len(rows) - 1) if texts[index] != outputs(free)[index]]
    assert len(differing) >= len(STATED) - 2


@pytest.mark.full
def test_a_batch_that_states_nothing_runs_the_program_of_before() -> None:
    """Check the state's structure, and that a second call with penalties compiles nothing."""
    neutral = [SETTINGS["drawn"]] * 2
    _, state = specjax.decoding.start(
        models()[0],
        None,
        PROMPTS[:2],
        options=specjax.decoding.GenerationOptions(**options(neutral)),
    )
    assert state.sampling.adjustments is None
    rows = rows_of("drawn")[:2]
    generate("chain", rows, PROMPTS[:2])
    before = compilations()
    generate("chain", [rows[1], rows[0]], PROMPTS[2:4])
    assert compilations() == before


@pytest.mark.full
def test_a_stop_token_waits_for_its_minimum_beside_penalties() -> None:
    """Check min_new_tokens together with a bias that would end each text at once."""
    rows = [{"temperature": 0.9, "logit_bias": {6: 50.0}, "presence_penalty": 0.5}] * 3
    for drafter in ("none", "static tree"):
        result = generate(drafter, rows, PROMPTS[:3], eos_token_ids=(6,), min_new_tokens=4)
        assert [len(text) for text in outputs(result)] == [5, 5, 5]
        assert all(text.index(6) == 4 for text in outputs(result))


@pytest.mark.thorough
def test_where_no_token_is_left_a_text_ends_with_an_error() -> None:
    """Check that it ends at the same token with every drafter, and that the others go on."""
    # After the word's first token nothing else may come.
    words = [[1, token] for token in range(VOCABULARY)]
    rows = [{"temperature": 0.0, "logit_bias": {1: 1.0}, "bad_words": words}, {"temperature": 0.0}]
    ends = set()
    for drafter in DRAFTERS:
        with pytest.raises(LogitsError) as caught:
            generate(drafter, rows, PROMPTS[:2])
        assert list(caught.value.rows) == [0]
        ends.add((*caught.value.positions, *outputs(caught.value.result)[0]))
        assert len(outputs(caught.value.result)[1]) == NEW
    assert len(ends) == 1
    assert next(iter(ends))[-1] == 1


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {1: "a"}}, r"logit_bias\[1\]='a'"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "-1 is not a token id"),
        ({"logit_bias": {"x": 1.0}}, "'x' is not a token id"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "outside the vocabulary"),
        ({"allowed_token_ids": []}, "no token is allowed"),
        ({"allowed_token_ids": [VOCABULARY]}, "outside the vocabulary"),
        ({"allowed_token_ids": "12"}, "list of token ids"),
        ({"bad_words": [[]]}, "empty"),
        ({"bad_words": ["a"]}, "'a' needs a tokenizer"),
        ({"bad_words": "a"}, "list of strings"),
        ({"bad_words": [[0, VOCABULARY]]}, "outside the vocabulary"),
        ({"bad_words": [[token] for token in range(VOCABULARY)]}, "no token is left"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0:"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named(stated, message) -> None:
    with pytest.raises(InputError, match=message):
        generate("none", [stated], PROMPTS[:1])


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_logits_along_paths_equal_the_oracle(seed) -> None:
    """Check logits at many nodes with paths, also in a vocabulary of a drafter."""
    random = np.random.default_rng(seed)
    rows = [
        {
            "presence_penalty": random.uniform(-1, 1),
            "frequency_penalty": random.uniform(-1, 1),
            "repetition_penalty": random.uniform(0.5, 2),
            "logit_bias": {3: 1.0},
            "bad_words": [random.integers(0, VOCABULARY, size).tolist() for size in (2, 2, 3)],
        }
        for _ in range(3)
    ]
    outputs = [random.integers(0, VOCABULARY, length).tolist() for length in (0, 1, 6)]
    prompts = PROMPTS[:3].tolist()
    paths = random.integers(0, VOCABULARY, (3, 5, 4)).astype(np.int32)
    lengths = random.integers(0, 5, (3, 5))
    paths[np.arange(4) >= lengths[..., None]] = NO_TOKEN
    logits = random.normal(size=(3, 5, VOCABULARY)).astype(np.float32)
    biases = [TokenBiases.of(row["logit_bias"], None, row["bad_words"]) for row in rows]
    state = Adjustments.of_texts(
        [prompt + output for prompt, output in zip(prompts, outputs, strict=True)],
        [len(prompt) for prompt in prompts],
        VOCABULARY,
        np.stack([bias.bias(VOCABULARY) for bias in biases]),
        [bias.words for bias in biases],
    )
    strengths = [
        jnp.array([row[name] for row in rows])
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    ]
    result = jax.jit(adjusted)(logits, state, *strengths, paths)
    for row, node in itertools.product(range(3), range(5)):
        output = outputs[row] + paths[row, node, : lengths[row, node]].tolist()
        expected_logits = oracle_logits(logits[row, node], prompts[row], output, rows[row])
        np.testing.assert_allclose(result[row, node], expected_logits, rtol=1e-5, atol=1e-5)
    ids = np.array([5, 0, 3])
    of_drafter = adjusted(logits[..., ids], state, *strengths, paths, jnp.asarray(ids))
    np.testing.assert_allclose(of_drafter, np.asarray(result)[..., ids], rtol=1e-6)
    by_row = jnp.asarray(np.stack([np.roll(ids, row) for row in range(3)]))
    selected = np.take_along_axis(logits, np.asarray(by_row)[:, None], axis=-1)
    of_rows = adjusted(selected, state, *strengths, paths, by_row)
    expected_logits = np.take_along_axis(np.asarray(result), np.asarray(by_row)[:, None], axis=-1)
    np.testing.assert_allclose(of_rows, expected_logits, rtol=1e-6)


def test_counting_token_by_token_equals_counting_whole_texts() -> None:
    """Check the state after emitted tokens, of any number, against that of the longer text."""
    random = np.random.default_rng(0)
    texts, lengths = [prompt.tolist() for prompt in PROMPTS[:3]], [PROMPTS.shape[1]] * 3
    words = [[[1, 2, 3]], [], [[0, 0], [4, 4, 4, 4]]]

    def whole() -> Adjustments:
        return Adjustments.of_texts(texts, lengths, VOCABULARY, None, words)

    state = jax.tree.map(jnp.asarray, whole())
    for _ in range(6):
        emitted, count = random.integers(0, VOCABULARY, (3, 4)), random.integers(0, 5, 3)
        state = jax.jit(Adjustments.after)(state, emitted, count)
        for row in range(3):
            texts[row] += emitted[row, : count[row]].tolist()
        for leaf, expected_leaf in zip(
            jax.tree.leaves(state), jax.tree.leaves(whole()), strict=True
        ):
            np.testing.assert_array_equal(leaf, expected_leaf)


# --- the distribution -----------------------------------------------------------------------------

RULES: dict[str, tuple[str, str]] = {
    "block": ("chain", "block"),
    "rejection": ("chain", "rejection"),
    "siblings": ("sampled tree", "independent"),
    "matching": ("dynamic tree", "independent"),
    "coupled": ("chain", "coupled"),
    "coupled tree": ("static tree", "coupled"),
}
HORIZON = 3


DRAWS = 6_000
"""The texts for each G-test: enough to notice each of `BREAKS`."""


def p_values(rule: str, rows: Sequence[dict[str, Any]], draws: int = DRAWS) -> list[float]:
    """Return the p-values of G-tests of texts of three tokens, for each of ``rows``.

    All are drawn in one batch.
    """
    drafter, verification_rule = RULES[rule]
    result = generate(
        drafter,
        [stated for stated in rows for _ in range(draws)],
        np.tile(PROMPTS[:1], (draws * len(rows), 1)),
        max_new_tokens=HORIZON,
        rule=verification_rule,
        key=jax.random.key(8),
    )
    counts = np.zeros((len(rows), *[VOCABULARY] * HORIZON))
    row = np.repeat(np.arange(len(rows)), draws)
    np.add.at(counts, (row, *np.array(outputs(result)).T), 1)
    return [
        g_test(counts[index].reshape(-1), exact_joint(stated).reshape(-1))
        for index, stated in enumerate(rows)
    ]


def exact_joint(stated: dict[str, Any]) -> np.ndarray:
    """Return the probability of every continuation of three tokens, by the oracle."""
    prompt = PROMPTS[0].tolist()
    exact = np.ones([VOCABULARY] * HORIZON)
    for text in itertools.product(range(VOCABULARY), repeat=HORIZON):
        for index, token in enumerate(text):
            before = list(text[:index])
            logits = oracle_logits(next_logits((*prompt, *before)), prompt, before, stated)
            exact[text] *= oracle_probabilities(logits, stated)[token]
            if not exact[text]:
                break
    return exact


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [DRAWS, 20_000])
@pytest.mark.parametrize("rule", list(RULES))
def test_the_distribution_is_exact(rule, draws) -> None:
    """Check every parameter alone, and all of them together."""
    assert min(p_values(rule, list(STATED.values()), draws)) >= FALSE_ALARM


@pytest.mark.full
@pytest.mark.thorough_except("repetition")
@pytest.mark.parametrize("stated", ["repetition", "negative"])
def test_the_conformance_suite_knows_penalties(stated) -> None:
    """Check its distribution of all continuations against the oracle's."""
    settings = STATED[stated] | {"temperature": 0.8, "top_p": 0.9}
    joint = conformance.exact_joint(models()[0], PROMPTS[0], HORIZON, specjax.Sampling(**settings))
    expected_joint = exact_joint(settings).reshape(-1)
    np.testing.assert_allclose(joint, expected_joint / expected_joint.sum(), atol=1e-5)


def _without_the_root(after: Callable) -> Callable:
    return lambda self, emitted, count: after(self, emitted, jnp.maximum(count - 1, 0))


def _without_the_path(before_temperature: Callable) -> Callable:
    def forgetful(*arguments, path=None, **options):
        return before_temperature(*arguments, **options)

    return forgetful


def _of_another_path(before_temperature: Callable) -> Callable:
    def mistaken(*arguments, path=None, **options):
        if path is not None:
            path = jnp.where(path >= 0, (path + 1) % VOCABULARY, path)
        return before_temperature(*arguments, path=path, **options)

    return mistaken


def _after_temperature(before_temperature: Callable) -> Callable:
    def late(logits, rows, depth, **options):
        is_greedy = rows.temperature == 0
        temperature = jnp.where(is_greedy, 1.0, rows.temperature)
        temperature = temperature.reshape(-1, *(1,) * (logits.ndim - 1))
        changed = before_temperature(logits / temperature, rows, depth, **options)
        return changed * temperature

    return late


def _prompt_counts_too(of_texts: Callable) -> Callable:
    def wide(texts, prompt_lengths, *arguments):
        return of_texts(texts, [0] * len(texts), *arguments)

    return wide


BREAKS: dict[str, tuple[Any, str, Callable, str]] = {
    "counts without the root": (Adjustments, "after", _without_the_root, "presence"),
    "counts without the path": (
        *(verification, "before_temperature", _without_the_path),
        "presence",
    ),
    "counts of another path": (
        *(verification, "before_temperature", _of_another_path),
        "frequency",
    ),
    "penalties after the temperature": (
        *(verification, "before_temperature", _after_temperature),
        "presence",
    ),
    "frequency counts the prompt": (Adjustments, "of_texts", _prompt_counts_too, "frequency"),
    "words without the path": (verification, "before_temperature", _without_the_path, "words"),
}


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.thorough_except("counts without the root-block")
@pytest.mark.parametrize("rule", ["block", "siblings", "coupled"])
@pytest.mark.parametrize("name", list(BREAKS))
def test_a_broken_rule_is_noticed(name, rule, monkeypatch) -> None:
    owner, attribute, broken, stated = BREAKS[name]
    monkeypatch.setattr(owner, attribute, broken(getattr(owner, attribute)))
    temperature = 0.6 if "temperature" in name else 1.0
    # Strong, so that so few draws notice it.
    changed = STATED[stated] | {"temperature": temperature}
    assert p_values(rule, [changed])[0] < FALSE_ALARM


@pytest.mark.full
@pytest.mark.thorough_except("EAGLE-3 of few tokens")
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("drafter", ["chain", "dynamic tree", "EAGLE-3 of few tokens"])
def test_a_drafter_that_counts_differently_changes_speed_alone(drafter, monkeypatch) -> None:
    rows = rows_of("drawn")

    monkeypatch.setattr(candidates, "before_temperature", lambda logits, rows, depth, **_: logits)
    result = generate(drafter, rows, prompts_of(rows))
    assert outputs(result) == expected("drawn")


# --- memory ---------------------------------------------------------------------------------------


def _memory(run: Any, rows: int, nodes: int, settings: Any, words: int = 64) -> tuple[int, int]:
    """Return the bytes of a verdict at 151,936 tokens beside its arguments.

    They are those without penalties, and those with penalties, by the compiler.
    """
    vocab, shape = 151_936, jax.ShapeDtypeStruct
    adjustments = Adjustments(
        counts=shape((rows, vocab), jnp.int32),
        bias=shape((rows, vocab), jnp.float32),
        words=shape((rows, words, 8), jnp.int32),
        tail=shape((rows, 7), jnp.int32),
    )

    def temporary(settings: Any) -> int:
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        arguments = shape((rows, nodes), jnp.int32), shape((rows, nodes, vocab), jnp.float32)
        compiled = jax.jit(run).lower(*arguments, settings, keys).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    return temporary(settings), temporary(replace(settings, adjustments=adjustments))


@pytest.mark.full
@pytest.mark.parametrize("greedy", [False, True])
def test_penalties_make_no_array_of_all_nodes(greedy) -> None:
    """Check the memory of a verdict of 8 rows, 60 nodes and 151,936 tokens, by the compiler."""
    rows, nodes, vocab = 8, 60, 151_936
    parents = np.array([-1, *((node - 1) // 2 for node in range(1, nodes))])
    settings = specjax.Sampling(temperature=0.0 if greedy else 0.8, top_p=0.9).rows(rows, "coupled")

    def run(tokens: Any, logits: Any, settings: Any, keys: Any) -> Any:
        draft = Draft.of_tree(tokens, parents)
        depths = jnp.arange(draft.depth + 1)[:, None]
        positions = jnp.broadcast_to(depths, (len(depths), rows))
        return verification.verify(draft, logits, settings, position_keys(keys, positions))

    without, with_penalties = _memory(run, rows, nodes, settings)
    assert with_penalties < without + 3 * rows * vocab * 4


@pytest.mark.full
@pytest.mark.thorough_except("block-1.0", "rejection-0.9")
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_penalties_store_the_logits_of_a_chain_once(rule, top_p) -> None:
    """Check the memory of the rules that need the distributions of all nodes, by the compiler."""
    rows, nodes, vocab = 8, 8, 151_936
    settings = specjax.Sampling(temperature=0.8, top_p=top_p).rows(rows, rule)

    def run(tokens: Any, logits: Any, settings: Any, keys: Any) -> Any:
        draft = Draft.of_tree(tokens, tree.chain_parents(nodes), q=jax.nn.softmax(logits))
        return verification.verify(draft, logits, settings, keys)

    without, with_penalties = _memory(run, rows, nodes, settings)
    # A second array would be a whole one more.
    assert with_penalties < without + 1.25 * rows * nodes * vocab * 4
