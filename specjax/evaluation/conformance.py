"""What every drafter must keep, as checks that run on any: yours, before you trust it.

    from specjax.evaluation import conformance
    conformance.check(target, MyDrafter())

Each check raises an AssertionError that says what is wrong. All but `check_distribution` take any target, in float32 (in lower
precision near-ties may fall either way); that one enumerates the target's exact distribution and needs a tiny vocabulary.
`tests/evaluation/test_conformance.py` runs them over every drafter of the library with every shape of draft.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.drafters.base import Drafter
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models.transformer import Target
from specjax.sampling import Rule, Sampling, probabilities

_LENGTHS = np.array([6, 1, 3])
_NEW_TOKENS = 24
_MIXED = Sampling(temperature=np.array([0.0, 1.0, 0.7]), top_p=np.array([1.0, 1.0, 0.8]), top_k=np.array([0, 5, 0]))
_AMONG_OTHERS = Sampling(temperature=np.array([1.0, 0.7, 0.0]), top_p=np.array([1.0, 0.8, 0.6]), top_k=np.array([5, 0, 2]))


def check(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """All checks that any target allows.

    They are `check_contract`, `check_one_trace`, `check_greedy`, `check_rows` and `check_coupled`.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    step = _CountedStep(target, drafter)
    _check_contract(step)
    _check_one_trace(step)
    check_greedy(target, drafter, new_tokens=new_tokens)
    check_rows(target, drafter, new_tokens=new_tokens)
    check_coupled(target, drafter, new_tokens=new_tokens)


def check_contract(target: Target, drafter: Drafter) -> None:
    """Drafts are what `Draft` says, of the drafter's shape, and a step leaves the shapes of the state as they were.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_contract(target, specjax.PromptLookup(draft=2))
    """
    _check_contract(_CountedStep(target, drafter))


class _CountedStep:
    """A step of decoding that is traced and never compiled.

    Attributes:
        target: the target.
        drafter: the drafter.
        traces: how often the step was traced.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter, self.traces = target, drafter, 0
        self._step = jax.jit(self._counted)

    def _counted(self, state: decoding.DecodeState) -> decoding.DecodeState:
        self.traces += 1
        return decoding.step(self.target, self.drafter, state)[0]

    def after(self, state: decoding.DecodeState) -> decoding.DecodeState:
        """The shapes of the state after a step from ``state``."""
        return self._step.eval_shape(state)


def _check_contract(step: _CountedStep) -> None:
    _check_step(step, Sampling(temperature=0.0))
    _check_step(step, _MIXED)


def _check_step(step: _CountedStep, sampling: Sampling) -> None:
    target = step.target
    drafter, state = _start(target, step.drafter, sampling)

    def propose(target: Target, drafter: Drafter, state: decoding.DecodeState) -> tuple[Draft, jax.Array]:
        draft, _ = decoding.propose_step(target, drafter, state)
        return draft, state.roots

    for leaf in jax.tree.leaves(state):
        assert leaf.shape[:1] == state.lengths.shape, f"a leaf of the state has shape {leaf.shape}: rows must come first"
    draft, roots = sharding.to_host(jax.jit(propose)(target, drafter, state), target.mesh)
    _check_draft(draft, drafter, target.config.vocab_size, roots)
    after = step.after(state)
    chex.assert_trees_all_equal_structs(state, after)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)


def _check_draft(draft: Draft, drafter: Drafter, vocab: int, root: np.ndarray) -> None:
    shape, batch = drafter.draft_shape, len(root)
    chex.assert_shape(draft.tokens, (batch, shape.nodes), custom_message="tokens [B, N]")
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    np.testing.assert_array_equal(tokens[:, 0], root, "node 0 must be the root")
    valid = np.ones(tokens.shape, bool) if draft.valid is None else np.asarray(draft.valid)
    assert valid.shape == tokens.shape and valid[:, 0].all(), "valid [B, N], the root among them"
    assert np.all((tokens >= 0) & (tokens < vocab)), "token ids outside the vocabulary"
    assert parents.shape in ((shape.nodes,), tokens.shape), "parents [N] or [B, N]"
    assert np.all(parents[..., 0] == -1), "the root's parent must be -1"
    below = parents[..., 1:]
    assert np.all((below >= 0) & (below < np.arange(1, shape.nodes))), "parents must come before their children"
    assert draft.depth == shape.depth, f"the draft says depth {draft.depth}, its shape {shape.depth}"
    for row, of_row in enumerate(np.broadcast_to(parents, tokens.shape)):
        assert tree.depths(np.array(of_row))[valid[row]].max() <= shape.depth, f"row {row}: a node deeper than {shape.depth}"
        assert valid[row, of_row[1:][valid[row, 1:]]].all(), f"row {row}: a valid node below one that is not"
    assert shape.nodes in drafter.node_counts, "no compiled number of nodes holds a full draft"
    for row, of_row in enumerate(np.broadcast_to(parents, tokens.shape)):
        siblings = list(zip(of_row[valid[row]].tolist(), tokens[row, valid[row]].tolist(), strict=True))
        assert len(set(siblings)) == len(siblings), f"row {row}: two siblings have the same token"
    if draft.q is not None:
        chex.assert_shape(draft.q, (batch, shape.nodes, vocab), custom_message="q [B, N, V]")
        chex.assert_type(draft.q, jnp.float32)
        for row, of_row in enumerate(np.broadcast_to(parents, tokens.shape)):
            inner = np.unique(of_row[1:][valid[row, 1:]])
            np.testing.assert_allclose(np.asarray(draft.q)[row, inner].sum(-1), 1, atol=1e-5, err_msg="q must sum to 1")


def check_one_trace(target: Target, drafter: Drafter) -> None:
    """A step is traced once: neither another prompt nor what a step makes of its state causes a second compilation.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_one_trace(target, specjax.PromptLookup(draft=2))
    """
    _check_one_trace(_CountedStep(target, drafter))


def _check_one_trace(step: _CountedStep) -> None:
    traces = []
    for seed, temperature in enumerate((0.5, 2.0)):
        _, state = _start(step.target, step.drafter, Sampling(temperature=temperature, top_p=0.9), seed)
        for _ in range(2):
            state = step.after(state)
            traces.append(step.traces)
    again = traces[-1] - traces[0]  # the first was traced here, or by `check_contract`
    assert not again, f"a step was traced {1 + again} times: its state changes shape or type"


def check_greedy(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """At temperature 0 the tokens are those of plain decoding.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_greedy(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    prompts = _prompts(target)
    plain, drafted = (
        decoding.generate(target, with_drafter, prompts, _LENGTHS, max_new_tokens=new_tokens)
        for with_drafter in (None, drafter)
    )
    for row, (expected, got) in enumerate(zip(_outputs(plain), _outputs(drafted), strict=True)):
        assert got == expected, f"row {row}: greedy tokens {got} are not plain decoding's {expected}"


def check_rows(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """A row's tokens and statistics are the same at another place of a batch, among rows of other prompts and settings.

    A greedy row is compared with itself among other greedy rows.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_rows(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    prompts, keys = _prompts(target), jax.random.split(jax.random.key(3), 4)
    run = partial(decoding.generate, target, drafter, max_new_tokens=new_tokens, rule="independent")
    together = run(prompts, _LENGTHS, sampling=_MIXED, key=keys[:3])
    _check_same(together, 0, run(prompts, _LENGTHS), 0)
    moved = np.array([1, 2, 0])
    others = run(prompts[moved], np.append(_LENGTHS[[1, 2]], 2), sampling=_AMONG_OTHERS, key=keys[np.array([1, 2, 3])])
    _check_same(together, 1, others, 0)
    _check_same(together, 2, others, 1)


def check_coupled(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """With coupled sampling the text is plain decoding's: see `specjax.sampling.Rule`.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_coupled(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    run = partial(decoding.generate, target, max_new_tokens=new_tokens, sampling=_MIXED, rule="coupled")
    prompts, keys = _prompts(target), jax.random.split(jax.random.key(3), len(_LENGTHS))
    plain, drafted = (_outputs(run(each, prompts, _LENGTHS, key=keys)) for each in (None, drafter))
    for row, (expected, got) in enumerate(zip(plain, drafted, strict=True)):
        assert got == expected, f"row {row}: coupled tokens {got} are not plain decoding's {expected}"


def _check_same(result: decoding.Result, row: int, elsewhere: decoding.Result, there: int) -> None:
    assert _outputs(result)[row] == _outputs(elsewhere)[there], f"row {row}: other tokens among other rows"
    # How wide a pass was is the batch's affair.
    here, moved = metrics.summarise(result.stats, row), metrics.summarise(elsewhere.stats, there)
    assert replace(here, scored=0) == replace(moved, scored=0), f"row {row}: other statistics among other rows"


SETTINGS = (Sampling(), Sampling(temperature=1.4, top_p=0.9))
"""What `check_distribution` samples with unless told otherwise."""

FALSE_ALARM = 1e-9
"""The chance that a right drafter or rule fails one G-test. The library's whole suite asks for less than a thousand p-values,
the thorough tests among them: a right library fails it with probability 1e-6."""

_LEAST_EXPECTED = 40
"""Draws of a cell. Of 2 to 60 cells with this many, exact draws fell below p = 1e-3, 1e-4 and 1e-5 as often as p says, within a
third; with 10 of them up to three times as often."""


def check_distribution(
    target: Target,
    drafter: Drafter,
    settings: Sequence[Sampling] = SETTINGS,
    *,
    rule: Rule = "independent",
    draws: int = 200_000,
    false_alarm: float = FALSE_ALARM,
) -> None:
    """Generated tokens have the target's own joint distribution, as far as ``draws`` of each setting can tell.

    A right drafter fails with probability ``false_alarm`` for each setting, over all random keys. The default rule judges drawn
    tokens by the drafter's own q, so that a wrong q shows. Coupled sampling never reads q: it would say nothing about the
    drafter.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> conformance.check_distribution(tiny, drafter, draws=2_000)
    """
    for sampling, p_value in zip(settings, p_values(target, drafter, settings, rule=rule, draws=draws), strict=True):
        assert p_value >= false_alarm, (
            f"{sampling}: not the target's distribution: a G-test of {draws} draws gives p = {p_value:.1e}, and draws from the "
            f"target fall below {false_alarm:g} with that probability"
        )


def p_values(
    target: Target,
    drafter: Drafter | None,
    settings: Sequence[Sampling] = SETTINGS,
    *,
    rule: Rule = "independent",
    draws: int = 200_000,
    horizon: int = 3,
) -> list[float]:
    """For each setting, `g_test` of the next tokens, ``horizon`` of them, against the target's exact distribution.

    The settings are drawn with side by side, in the rows of the same batches.

    Raises:
        InputError: the target's vocabulary is too large to enumerate.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> values = conformance.p_values(tiny, drafter, draws=2_000)
        >>> min(values) > 1e-9
        True
    """
    vocab, rows = target.config.vocab_size, min(50_000 // len(settings), draws) * len(settings)
    if vocab**horizon > 10_000:
        raise InputError(
            f"target has {vocab} tokens: {vocab}^{horizon} continuations are too many to enumerate; take a tiny one"
        )
    prompt = np.array([1, 3, 0, 1]) % vocab
    names = Sampling.__dataclass_fields__
    mixed = Sampling(**{name: np.resize([getattr(setting, name) for setting in settings], rows) for name in names})
    counts = np.zeros((len(settings), vocab**horizon))
    for i in range(-(-draws * len(settings) // rows)):
        result = decoding.generate(
            target,
            drafter,
            np.tile(prompt, (rows, 1)),
            max_new_tokens=horizon,
            sampling=mixed,
            key=jax.random.split(jax.random.key(i), rows),
            rule=rule,
        )
        joint = np.asarray(result.tokens)[:, len(prompt) :] @ (vocab ** np.arange(horizon)[::-1])
        for number in range(len(settings)):
            counts[number] += np.bincount(joint[number :: len(settings)], minlength=vocab**horizon)
    exact = [exact_joint(target, prompt, horizon, setting) for setting in settings]
    return [g_test(*pair) for pair in zip(counts, exact, strict=True)]


def exact_joint(target: Target, prompt: np.ndarray, horizon: int, sampling: Sampling) -> np.ndarray:
    """``[V ** horizon]`` the target's distribution of the tokens after ``prompt``, by running it on every continuation.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> joint = conformance.exact_joint(
        ...     tiny, np.array([1, 0, 0, 1]), horizon=3, sampling=specjax.Sampling()
        ... )
        >>> joint.shape, round(joint.sum(), 6)
        ((27,), np.float64(1.0))
    """
    vocab = target.config.vocab_size
    tails = np.array(list(itertools.product(range(vocab), repeat=horizon)))
    tokens = np.concatenate([np.tile(prompt, (len(tails), 1)), tails], axis=1)
    output, _ = jax.jit(Target.forward)(target, tokens)
    p = sharding.to_host(probabilities(output.logits, sampling.rows(len(tails))), target.mesh).astype(np.float64)
    joint = np.ones(len(tails))
    for i in range(horizon):
        joint *= p[np.arange(len(tails)), len(prompt) - 1 + i, tails[:, i]]
    return joint / joint.sum()


def g_test(counts: np.ndarray, exact: np.ndarray) -> float:
    """The p-value of ``counts`` of independent draws: how likely draws from ``exact`` are to be as far from it, or farther.

    The G-test: ``2 sum_i n_i log(n_i / (n p_i))`` is distributed as chi-square, with one degree of freedom less than there are
    cells (Wilks 1938). That takes cells that are hit often: those expected less than `_LEAST_EXPECTED` times count as one. A
    draw of probability 0 is no chance; it gives 0.

    Args:
        counts: ``[n]`` how often each outcome came.
        exact: ``[n]`` their probabilities.

    Examples:
        >>> from specjax import conformance
        >>> fair, biased = np.array([5020, 4980]), np.array([5300, 4700])
        >>> half = np.array([0.5, 0.5])
        >>> round(conformance.g_test(fair, half), 2)
        0.69
        >>> conformance.g_test(biased, half) < 1e-8
        True
    """
    if np.any(counts[exact == 0]):
        return 0.0
    expected = counts.sum() * exact / exact.sum()
    order = np.argsort(expected)
    # The first cells, as many as are expected too rarely, or more of them where that is too little still.
    enough = 1 + int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED))
    pool = min(max(enough, int(np.sum(expected < _LEAST_EXPECTED))), len(order))

    def pooled(values: np.ndarray) -> np.ndarray:
        return np.append(values[order[pool:]], values[order[:pool]].sum())

    found, hoped = pooled(counts), pooled(expected)
    g = max(0.0, 2 * special.xlogy(found, found / hoped).sum())  # rounding may leave it below 0
    return float(special.chdtrc(len(found) - 1, g)) if len(found) > 1 else 1.0


def _prompts(target: Target, seed: int = 0) -> np.ndarray:
    """``[3, 6]`` prompts, of which `_LENGTHS` count, with the repetitions that a drafter may look for."""
    prompts = np.random.default_rng(seed).integers(0, target.config.vocab_size, (len(_LENGTHS), _LENGTHS.max()))
    prompts[:, 3:] = prompts[:, :3]
    return prompts


def _start(target: Target, drafter: Drafter, sampling: Sampling, seed: int = 0) -> tuple[Drafter, decoding.DecodeState]:
    return decoding.start(
        target, drafter, _prompts(target, seed), _LENGTHS, GenerationOptions(max_new_tokens=_NEW_TOKENS, sampling=sampling)
    )


def _outputs(result: decoding.Result) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True)]
