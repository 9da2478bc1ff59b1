"""Checks of the contract that every drafter must keep, also your own.

    from specjax.evaluation import conformance
    conformance.check(target, MyDrafter())

A check that fails raises an AssertionError with the reason. All but `check_distribution` take any
target. It should be in float32, because in lower precision near-ties may go either way.
`check_distribution` enumerates the target's exact distribution, and needs a tiny vocabulary.
`tests/evaluation/test_conformance.py` runs the checks for every drafter of the library with every
shape of draft.
"""

import string
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoding, sharding
from specjax.decoding import rows
from specjax.decoding.options import GenerationOptions
from specjax.drafters.base import Drafter
from specjax.drafters.pausable import Pausable
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.evaluation import metrics
from specjax.evaluation.exact import (
    FALSE_ALARM,
    SETTINGS,
    check_distribution,
    exact_joint,
    g_test,
    p_values,
)
from specjax.grammars import GrammarCompiler, Regex
from specjax.models.cache import PagedCache, groups_of
from specjax.models.transformer import Target
from specjax.sampling import SAMPLING_NAMES, Sampling

__all__ = [
    "FALSE_ALARM",
    "SETTINGS",
    "check",
    "check_contract",
    "check_coupled",
    "check_distribution",
    "check_grammar",
    "check_greedy",
    "check_insert",
    "check_one_trace",
    "check_rows",
    "check_rows_that_come_and_go",
    "exact_joint",
    "g_test",
    "p_values",
]

_LENGTHS = np.array([6, 1, 3])
_NEW_TOKENS = 24
_MIXED = Sampling(
    temperature=np.array([0.0, 1.0, 0.7]),
    top_p=np.array([1.0, 1.0, 0.8]),
    top_k=np.array([0, 5, 0]),
)
_AMONG_OTHERS = Sampling(
    temperature=np.array([1.0, 0.7, 0.0]),
    top_p=np.array([1.0, 0.8, 0.6]),
    top_k=np.array([5, 0, 2]),
)


def check(
    target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS, come_and_go: bool = True
) -> None:
    """Run all checks that do not depend on the target.

    They are `check_contract`, `check_one_trace`, `check_greedy`, `check_rows`, `check_coupled`,
    `check_grammar`, `check_insert` and `check_rows_that_come_and_go`.

    Args:
        target: the target.
        drafter: the drafter.
        new_tokens: the maximum number of tokens of each text.
        come_and_go: whether to run the last check, which compiles as much as several of the others.

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
    check_grammar(target, drafter, new_tokens=new_tokens)
    check_insert(target, drafter, new_tokens=new_tokens)
    if come_and_go:
        check_rows_that_come_and_go(target, drafter, new_tokens=new_tokens)


def check_contract(target: Target, drafter: Drafter) -> None:
    """Check that drafts are valid `Draft` objects, and that a step keeps the shapes of the state.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_contract(target, specjax.PromptLookup(draft=2))
    """
    _check_contract(_CountedStep(target, drafter))


class _CountedStep:
    """A step of decoding that is traced but never compiled.

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
        """Return the state after a step, as shapes."""
        return self._step.eval_shape(state)


def _check_contract(step: _CountedStep) -> None:
    _check_step(step, Sampling(temperature=0.0))
    _check_step(step, _MIXED)


def _check_step(step: _CountedStep, sampling: Sampling) -> None:
    target = step.target
    drafter, state = _start(target, step.drafter, sampling)

    def propose(
        target: Target, drafter: Drafter, state: decoding.DecodeState
    ) -> tuple[Draft, jax.Array]:
        draft, _ = decoding.propose_step(target, drafter, state)
        return draft, state.roots

    for leaf in jax.tree.leaves(state):
        assert leaf.shape[:1] == state.lengths.shape, (
            f"a leaf of the state has shape {leaf.shape}: rows must come first"
        )
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
    assert np.all((below >= 0) & (below < np.arange(1, shape.nodes))), (
        "parents must come before their children"
    )
    assert draft.depth == shape.depth, (
        f"the draft says depth {draft.depth}, its shape {shape.depth}"
    )
    parents_by_row = np.broadcast_to(parents, tokens.shape)
    for row, row_parents in enumerate(parents_by_row):
        assert tree.depths(np.array(row_parents))[valid[row]].max() <= shape.depth, (
            f"row {row}: a node deeper than {shape.depth}"
        )
        assert valid[row, row_parents[1:][valid[row, 1:]]].all(), (
            f"row {row}: a valid node below one that is not"
        )
    assert shape.nodes in drafter.node_counts, "no compiled number of nodes holds a full draft"
    for row, row_parents in enumerate(parents_by_row):
        siblings = list(
            zip(row_parents[valid[row]].tolist(), tokens[row, valid[row]].tolist(), strict=True)
        )
        assert len(set(siblings)) == len(siblings), f"row {row}: two siblings have the same token"
    if draft.q is not None:
        chex.assert_shape(draft.q, (batch, shape.nodes, vocab), custom_message="q [B, N, V]")
        chex.assert_type(draft.q, jnp.float32)
        for row, row_parents in enumerate(parents_by_row):
            inner = np.unique(row_parents[1:][valid[row, 1:]])
            np.testing.assert_allclose(
                np.asarray(draft.q)[row, inner].sum(-1), 1, atol=1e-5, err_msg="q must sum to 1"
            )


def check_one_trace(target: Target, drafter: Drafter) -> None:
    """Check that a step is traced once.

    Neither another prompt nor the state after a step may cause a second compilation.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_one_trace(target, specjax.PromptLookup(draft=2))
    """
    _check_one_trace(_CountedStep(target, drafter))


def _check_one_trace(step: _CountedStep) -> None:
    traces = []
    for seed, temperature in enumerate((0.5, 2.0)):
        _, state = _start(
            step.target, step.drafter, Sampling(temperature=temperature, top_p=0.9), seed
        )
        for _ in range(2):
            state = step.after(state)
            traces.append(step.traces)
    retraces = traces[-1] - traces[0]  # `check_contract` may have traced the step before
    assert not retraces, f"a step was traced {1 + retraces} times: its state changes shape or type"


def check_greedy(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """Check that greedy text equals that of plain decoding.

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
        assert got == expected, (
            f"row {row}: greedy tokens {got} are not plain decoding's {expected}"
        )


def check_rows(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """Check that a row's tokens and statistics do not depend on the other rows or on its index.

    The other rows have other prompts and sampling parameters. A greedy row is compared with itself
    among other greedy rows.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_rows(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    prompts, keys = _prompts(target), jax.random.split(jax.random.key(3), 4)
    run = partial(decoding.generate, target, drafter, max_new_tokens=new_tokens, rule="independent")
    together = run(prompts, _LENGTHS, sampling=_MIXED, key=keys[:3])
    _check_same(together, 0, run(prompts, _LENGTHS), 0)
    order = np.array([1, 2, 0])
    reordered = run(
        prompts[order],
        np.append(_LENGTHS[[1, 2]], 2),
        sampling=_AMONG_OTHERS,
        key=keys[np.array([1, 2, 3])],
    )
    _check_same(together, 1, reordered, 0)
    _check_same(together, 2, reordered, 1)


def check_coupled(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """Check that text with coupled sampling equals plain decoding's; see `specjax.sampling.Rule`.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_coupled(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    run = partial(
        decoding.generate, target, max_new_tokens=new_tokens, sampling=_MIXED, rule="coupled"
    )
    prompts, keys = _prompts(target), jax.random.split(jax.random.key(3), len(_LENGTHS))
    plain, drafted = (
        _outputs(run(with_drafter, prompts, _LENGTHS, key=keys)) for with_drafter in (None, drafter)
    )
    for row, (expected, got) in enumerate(zip(plain, drafted, strict=True)):
        assert got == expected, (
            f"row {row}: coupled tokens {got} are not plain decoding's {expected}"
        )


def check_grammar(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """Check that text under a grammar equals plain decoding's under the same grammar.

    The first tokens of the target's vocabulary stand for letters. Half of the letters are legal at
    one position, a single one at the next, and the other half at the third.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_grammar(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    vocab_size = target.config.vocab_size
    letters = string.ascii_letters[: vocab_size - 1]
    tokens = [letter.encode() for letter in letters] + [b""] * (vocab_size - len(letters))
    compiler = GrammarCompiler.of_tokens(tokens, end_id=vocab_size - 1)
    half = len(letters) // 2
    pattern = f"([{letters[:half]}]{letters[1]}[{letters[half:]}])*"
    run = partial(
        decoding.generate,
        target,
        max_new_tokens=new_tokens,
        sampling=_MIXED,
        eos_token_ids=(),
        grammar=compiler.compile(Regex(pattern)),
    )
    prompts, keys = _prompts(target), jax.random.split(jax.random.key(3), len(_LENGTHS))
    plain, drafted = (
        _outputs(run(with_drafter, prompts, _LENGTHS, key=keys)) for with_drafter in (None, drafter)
    )
    for row, (expected, got) in enumerate(zip(plain, drafted, strict=True)):
        assert got == expected, (
            f"row {row}: constrained tokens {got} are not plain decoding's {expected}"
        )
        forced = got[_LENGTHS[row] + 1 :: 3]
        assert set(forced) <= {1}, f"row {row}: {got} does not match {pattern}"


def check_insert(target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS) -> None:
    """Check that a request inserted into a running batch has the text of plain decoding.

    `decoding.insert` inserts it. The other rows must have the text of plain decoding as well.

    Examples:
        >>> from specjax import conformance
        >>> conformance.check_insert(target, specjax.PromptLookup(draft=2), new_tokens=8)
    """
    prompts, new_prompts = _prompts(target), _prompts(target, seed=1)
    keys, new_keys = (jax.random.split(jax.random.key(seed), len(_LENGTHS)) for seed in (3, 4))
    options = GenerationOptions(
        max_new_tokens=new_tokens, sampling=_MIXED, key=keys, rule="coupled"
    )
    drafter, state = decoding.start(target, drafter, prompts, _LENGTHS, options)
    # The last of the new prompts replaces the second row, which has not ended.
    last_sampling = Sampling(
        **{
            name: getattr(_MIXED.rows(len(_LENGTHS)), name)[-1]
            for name in Sampling.__dataclass_fields__
        }
    )
    alone = replace(options, sampling=last_sampling, key=new_keys[-1:])
    capacity = state.tokens.shape[1]
    _, request = decoding.start(
        target, drafter, new_prompts[-1:], _LENGTHS[-1:], alone, capacity=capacity, mixed=True
    )
    state = decoding.decode(target, drafter, state, 2)
    state = decoding.decode(
        target, drafter, decoding.insert(state, request, 1), jnp.iinfo(jnp.int32).max
    )
    plain = partial(
        decoding.generate, target, None, max_new_tokens=new_tokens, sampling=_MIXED, rule="coupled"
    )
    expected = _outputs(plain(prompts, _LENGTHS, key=keys))
    expected[1] = _outputs(plain(new_prompts, _LENGTHS, key=new_keys))[-1]
    for row, (text, got) in enumerate(
        zip(expected, _outputs(sharding.to_host(state, target.mesh)), strict=True)
    ):
        whose = "the inserted request" if row == 1 else "next to an inserted request"
        assert got == text, (
            f"row {row}, {whose}: coupled tokens {got} are not plain decoding's {text}"
        )


def check_rows_that_come_and_go(
    target: Target, drafter: Drafter, *, new_tokens: int = _NEW_TOKENS
) -> None:
    """Check continuous batching (`specjax.decoding.rows`): the texts and the drafter's state.

    There are more texts than rows. Their caches are paged, and every free page is filled with NaN.
    One text continues from the prefix of another. Steps with drafts and paused steps alternate
    (`specjax.drafters.pausable`).

    All texts must equal those of plain decoding. But coupled text never depends on the drafter's
    state, so an error in that state shows in the statistics alone. So one text is read twice: as a
    whole, and from another's pages and prefix state. And the whole check runs twice: the drafter
    catches up after several paused steps, or after each of them. The statistics must be equal.

    Examples:
        >>> from specjax import conformance
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> conformance.check_rows_that_come_and_go(target, drafter, new_tokens=8)
    """
    texts = _texts(target, new_tokens)
    settings = {name: np.array([text.sampling[name] for text in texts]) for name in SAMPLING_NAMES}
    lengths = np.array([text.length for text in texts])
    plain = decoding.generate(
        target,
        None,
        np.stack([text.tokens for text in texts])[:, : lengths.max()],
        lengths,
        max_new_tokens=np.array([text.max_length for text in texts]) - lengths,
        sampling=Sampling(**settings),
        key=jnp.stack([text.key for text in texts]),
        rule="coupled",
    )
    at_once, one_by_one = (
        _PagedRows(target, drafter, texts).run(paused) for paused in ([3], [1, 1, 1])
    )
    for index, expected in enumerate(_outputs(plain)):
        for got, _ in (at_once[index], one_by_one[index]):
            assert got == expected, (
                f"text {index} among texts that come and go: {got} is not plain decoding's"
                f" {expected}"
            )
        assert at_once[index][1] == one_by_one[index][1], (
            f"text {index}: the drafts differ if the drafter catches up after several paused steps,"
            f" or after each of them: {at_once[index][1]} and {one_by_one[index][1]}"
        )
    whole, shared = at_once[1][1], at_once[2][1]
    assert whole == shared, (
        "the drafts of a text that continues from a prefix state differ from those of one read"
        f" whole: {shared}, {whole}"
    )


_PAGE = 16
"""The number of tokens of a page and of a chunk: the smallest page that all devices support."""

_PAGED_ROWS = 3


def _texts(target: Target, new_tokens: int) -> list[rows.Text]:
    """Return the texts. The first three have a common prefix, and the second and third are equal.

    The last two wait for a free row.
    """
    prompts = np.tile(_prompts(target), 4)[[0, 0, 0, 1, 2], : _PAGE + 4]
    # A drafter pairs a token with the next one: the common prefix is one token longer than a page.
    prompts[1:3, _PAGE + 1 :] = _prompts(target, seed=1)[0, :3]
    full, keys = _PAGE + 4, jax.random.split(jax.random.key(5), 4)
    stop_token_ids = GenerationOptions().check(target.config, 1).stop_token_ids[0]

    def text(
        index: int, key: jax.Array, length: int, max_new_tokens: int, sampling: Sampling
    ) -> rows.Text:
        return rows.Text.of_prompt(
            prompts[index, :length],
            capacity=full + new_tokens,
            max_new_tokens=min(max_new_tokens, new_tokens),
            key=key,
            stop_token_ids=stop_token_ids,
            sampling=sampling,
        )

    greedy, sampled = Sampling(temperature=0.0), Sampling(top_p=0.9)
    return [
        text(0, keys[0], full, 4, greedy),
        text(1, keys[1], full, new_tokens, sampled),
        text(2, keys[1], full, new_tokens, sampled),
        text(3, keys[2], 1, 9, Sampling(temperature=0.7, top_k=5)),
        text(4, keys[3], 7, new_tokens, greedy),
    ]


class _PagedRows:
    """Rows with paged caches, and the page allocator on the host.

    On a mesh, each group of rows has the same texts, every second group in the opposite pages. So
    a group that reads the pages of another one finds other texts, or NaN.

    Args:
        target: the target.
        drafter: the drafter.
        texts: the texts. The second and the third begin with the first page of the first.
    """

    def __init__(self, target: Target, drafter: Drafter, texts: Sequence[rows.Text]) -> None:
        self.target, self.drafter, self.texts = target, Pausable(drafter), texts
        self.groups, capacity = groups_of(target.mesh), len(texts[0].tokens)
        pages_per_row = -(-capacity // _PAGE)
        self.pages = _PAGED_ROWS * pages_per_row
        sizes = {"capacity": capacity, "pages": self.pages, "page": _PAGE}
        self.state = rows.empty(
            target,
            self.drafter,
            rows=self.groups * _PAGED_ROWS,
            max_stop_tokens=len(texts[0].stop_token_ids),
            **sizes,
        )
        self.fresh = rows.empty_prefix_state(target, self.drafter, **sizes)
        # The last page is used first, and becomes the shared one. So a cache that takes -1 as the
        # last page, and not as none, damages it.
        self.free = list(range(self.pages))
        self.table = np.full((_PAGED_ROWS, pages_per_row), self.pages, np.int32)
        self.text_of_row: dict[int, int] = {}
        self.results: dict[int, tuple[list[int], metrics.Acceptance]] = {}
        self._spoil()

    def run(self, paused: Sequence[int]) -> dict[int, tuple[list[int], metrics.Acceptance]]:
        """Decode all texts, and return the tokens and the statistics of each.

        Steps with drafts and paused steps alternate. ``paused`` has the numbers of paused steps
        after each of which the drafter catches up.
        """
        prefix_state = self._begin(0, 0)
        self._begin(1, 1)
        self._begin(2, 2, cached=_PAGE, prefix_state=prefix_state, pages=self.table[0, :1].tolist())
        waiting = list(range(_PAGED_ROWS, len(self.texts)))
        while self.text_of_row:
            self._decode(self.drafter, 2)
            for steps in paused:
                self._decode(replace(self.drafter, paused=True), steps)
                width = self.groups * _PAGED_ROWS
                self.state = rows.catch_up(
                    self.target, self.drafter, self.state, self._full_table(), width=width
                )
            for row in range(_PAGED_ROWS):
                if waiting and row not in self.text_of_row:
                    self._begin(row, waiting.pop(0))
        return self.results

    def _begin(
        self,
        row: int,
        index: int,
        cached: int = 0,
        prefix_state: Any = None,
        pages: Sequence[int] = (),
    ) -> Any:
        """Admit a text and prefill its prompt. Return the prefix state after the first chunk."""
        text, self.text_of_row[row] = self.texts[index], index
        new_pages = [self.free.pop() for _ in range(-(-int(text.max_length) // _PAGE) - len(pages))]
        self.table[row, : len(pages) + len(new_pages)] = [*pages, *new_pages]
        prefix_state = self.fresh if prefix_state is None else prefix_state
        row_of_group = np.arange(self.groups, dtype=np.int32) * _PAGED_ROWS + row
        for group, group_row in enumerate(row_of_group):
            arguments = np.int32(cached), prefix_state, np.int32(group)
            self.state = rows.admit(
                self.target, self.drafter, self.state, group_row, text, *arguments
            )
        prefix_states, end = [], int(text.length) - 1
        while not prefix_states or cached < end:
            count = min(_PAGE, end - cached)
            cached += count
            arguments = (
                row_of_group,
                np.full_like(row_of_group, count),
                np.full(self.groups, cached == end),
            )
            self.state, prefix_state, _, _ = rows.read_chunk(
                self.target, self.drafter, self.state, self._full_table(), *arguments, size=_PAGE
            )
            prefix_states.append(prefix_state)
        return prefix_states[0]

    def _decode(self, drafter: Pausable, steps: int) -> None:
        """Decode some steps, remove the texts that are done, and fill their pages with NaN."""
        free = np.tile([row not in self.text_of_row for row in range(_PAGED_ROWS)], self.groups)
        arguments = free, np.int32(steps), np.bool_(False)
        table = self._full_table()
        self.state, progress = rows.decode_rows(
            self.target, drafter, self.state, table, *arguments, width=len(free), call_steps=1
        )
        progress, tokens = sharding.to_host((progress, self.state.tokens), self.target.mesh)
        stats = progress.stats
        for row in [row for row in self.text_of_row if progress.done[row]]:
            of_groups = [
                (tokens[copy, : progress.lengths[copy]].tolist(), metrics.summarise(stats, copy))
                for copy in range(row, len(free), _PAGED_ROWS)
            ]
            index = self.text_of_row.pop(row)
            for group, of_group in enumerate(of_groups):
                assert of_group == of_groups[0], (
                    f"text {index}: group {group} of the mesh has other tokens or statistics than"
                    f" group 0: {of_group} and {of_groups[0]}"
                )
            self.results[index] = of_groups[0]
            row_pages, self.table[row] = self.table[row].tolist(), self.pages
            self.free += sorted({page for page in row_pages if page not in self.table})
            self._spoil()

    def _spoil(self) -> None:
        """Fill all free pages with NaN; in a quantized cache, the scales of these pages."""
        is_free = np.isin(np.arange(self.pages), self.free)
        is_free = np.concatenate(
            [is_free[::-1] if group % 2 else is_free for group in range(self.groups)]
        )

        def spoiled(pool: jax.Array) -> jax.Array:
            if not jnp.issubdtype(pool.dtype, jnp.floating):
                return pool
            return jnp.where(is_free.reshape(-1, *(1,) * (pool.ndim - 1)), jnp.nan, pool)

        def with_spoiled_pages(node: Any) -> Any:
            if not isinstance(node, PagedCache):
                return node
            return replace(node, layers=jax.tree.map(spoiled, node.layers))

        self.state = jax.tree.map(
            with_spoiled_pages, self.state, is_leaf=lambda node: isinstance(node, PagedCache)
        )

    def _full_table(self) -> np.ndarray:
        opposite = np.where(self.table < self.pages, self.pages - 1 - self.table, self.pages)
        return np.concatenate(
            [opposite if group % 2 else self.table for group in range(self.groups)]
        )


def _check_same(result: decoding.Result, row: int, elsewhere: decoding.Result, there: int) -> None:
    assert _outputs(result)[row] == _outputs(elsewhere)[there], (
        f"row {row}: other tokens among other rows"
    )
    # The width of a pass depends on all rows of the batch.
    here = metrics.summarise(result.stats, row)
    reordered = metrics.summarise(elsewhere.stats, there)
    assert replace(here, scored=0) == replace(reordered, scored=0), (
        f"row {row}: other statistics among other rows"
    )


def _prompts(target: Target, seed: int = 0) -> np.ndarray:
    """Return prompts ``[3, 6]`` with lengths `_LENGTHS`, and repetitions for prompt lookup."""
    prompts = np.random.default_rng(seed).integers(
        0, target.config.vocab_size, (len(_LENGTHS), _LENGTHS.max())
    )
    prompts[:, 3:] = prompts[:, :3]
    return prompts


def _start(
    target: Target, drafter: Drafter, sampling: Sampling, seed: int = 0
) -> tuple[Drafter, decoding.DecodeState]:
    return decoding.start(
        target,
        drafter,
        _prompts(target, seed),
        _LENGTHS,
        GenerationOptions(max_new_tokens=_NEW_TOKENS, sampling=sampling),
    )


def _outputs(result: decoding.Result) -> list[list[int]]:
    return [
        row[:length].tolist()
        for row, length in zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True)
    ]
