"""Check that a row whose logits allow no token ends with an error, and in no other way.

Such logits are NaN, +inf, or -inf for every token. At a node with such logits every rule decides as
if nothing had been drafted below it. What is exact is compared bit for bit.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax import decoding
from specjax.decoding.verification import verify
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafters.expansion import expand
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, SampledTree
from specjax.errors import LogitsError
from specjax.models.transformer import Target
from specjax.pipeline import Run
from specjax.sampling import Sampling, position_keys, split_keys
from specjax.serving.engine import Engine
from specjax.serving.handle import EngineError
from specjax.text import GrowingText
from tests.conftest import SHAPES, outputs, tiny_target
from tests.test_text import of_bytes_and_spaces

V, ROWS = 5, 256
FAULTS = {
    "one NaN": lambda logits: logits.at[..., 3].set(jnp.nan),
    "all NaN": lambda logits: jnp.full_like(logits, jnp.nan),
    "NaN and +inf": lambda logits: logits.at[..., 0].set(jnp.nan).at[..., 1].set(jnp.inf),
    "+inf": lambda logits: logits.at[..., 2].set(jnp.inf),
    "+inf and -inf": lambda logits: logits.at[..., 0].set(jnp.inf).at[..., 1:].set(-jnp.inf),
    "all -inf": lambda logits: jnp.full_like(logits, -jnp.inf),
}
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=0.9, top_p=0.97)
RULES = {  # shape of draft, sampling, rule
    "greedy chain": (Chain(3), GREEDY, "independent"),
    "greedy tree": (SHAPES["static"], GREEDY, "independent"),
    "block": (Chain(3), DRAWN, "block"),
    "rejection": (Chain(3), DRAWN, "rejection"),
    "drawn siblings": (SampledTree((2, 2, 1)), DRAWN, "independent"),
    "chosen tokens": (SHAPES["static"], DRAWN, "independent"),
    "coupled chain": (Chain(3), DRAWN, "coupled"),
    "coupled tree": (SHAPES["static"], DRAWN, "coupled"),
}
TABLE = np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)
"""The target's logits after each token."""

DRAFTER_TABLE = TABLE + 0.3 * np.random.default_rng(2).normal(size=(V, V)).astype(np.float32)
"""The drafter's logits after each token, which are close to the target's."""


def drafted(shape, sampling, rule):
    """Return drafts of many rows, the target's logits at each node, and the keys of a verdict."""
    rows = sampling.rows(ROWS, rule)
    draft_keys, keys = split_keys(jax.random.split(jax.random.key(0), ROWS), 2)
    at_depths = split_keys(draft_keys, shape.depth)
    if rule == "coupled":
        at_depths = position_keys(
            draft_keys, jnp.broadcast_to(jnp.arange(shape.depth)[:, None], (shape.depth, ROWS))
        )
        keys = position_keys(
            draft_keys,
            jnp.broadcast_to(jnp.arange(shape.depth + 1)[:, None], (shape.depth + 1, ROWS)),
        )
    root = jnp.zeros(ROWS, jnp.int32)

    def read(frontier, state):
        return jnp.asarray(DRAFTER_TABLE)[frontier.tokens], state

    draft, _, _ = expand(
        shape,
        read,
        jnp.asarray(DRAFTER_TABLE)[root],
        (),
        root,
        rows,
        at_depths,
        active=jnp.ones(ROWS, bool),
    )
    return draft, jnp.asarray(TABLE)[draft.tokens], rows, keys


def cut_below(draft: Draft, node: jax.Array) -> Draft:
    """Return the draft without the nodes below each row's ``node [B]``."""
    above = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    valid = jnp.ones(draft.tokens.shape, bool) if draft.valid is None else draft.valid
    return replace(draft, valid=valid & (above != node[:, None]))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[] if name in ("block", "chosen tokens", "coupled tree") else pytest.mark.full,
        )
        for name in RULES
    ],
)
def test_every_rule_ends_at_a_node_without_a_distribution(name) -> None:
    """Check that a rule decides as if nothing had been drafted below the node.

    It reports an error if the path ends there. Other rows are not affected.
    """
    draft, logits, rows, keys = drafted(*RULES[name])
    run = jax.jit(verify)
    # The last index belongs to no node: its rows are sound.
    node = jnp.arange(ROWS) % (draft.tokens.shape[1] + 1)
    is_node = jnp.arange(draft.tokens.shape[1]) == node[:, None]
    expected = run(cut_below(draft, node), logits, rows, keys)
    ends = jnp.take_along_axis(expected.path, expected.count[:, None] - 1, axis=1)[:, 0] == node
    assert 0.1 < np.mean(ends) < 0.9
    assert not expected.bad.any()
    for fault, spoil in FAULTS.items():
        spoilt = jnp.where(is_node[..., None], spoil(logits), logits)
        verdict = run(draft, spoilt, rows, keys)
        assert np.array_equal(verdict.bad, ends), fault
        assert np.array_equal(verdict.count, expected.count), fault
        assert np.array_equal(
            jnp.where(ends, 0, verdict.token), jnp.where(ends, 0, expected.token)
        ), fault
        on_path = np.arange(verdict.path.shape[1]) < np.asarray(verdict.count)[:, None]
        assert np.array_equal(
            np.where(on_path, verdict.path, 0), np.where(on_path, expected.path, 0)
        ), fault


@pytest.mark.parametrize("name", ["block", "rejection", "drawn siblings"])
def test_what_a_drafter_could_not_draw_was_not_drafted(name) -> None:
    """Check that a q of NaN gives the same verdict as no draft below that node.

    The next token is then the target's own.
    """
    draft, logits, rows, keys = drafted(*RULES[name])
    node = jnp.arange(ROWS) % (draft.tokens.shape[1] + 1)
    is_node = jnp.arange(draft.tokens.shape[1]) == node[:, None]
    run = jax.jit(verify)
    expected = run(cut_below(draft, node), logits, rows, keys)
    spoilt = replace(draft, q=jnp.where(is_node[..., None], jnp.nan, draft.q))
    verdict = run(spoilt, logits, rows, keys)
    for leaf, expected_leaf in zip(
        jax.tree.leaves(verdict), jax.tree.leaves(expected), strict=True
    ):
        assert np.array_equal(leaf, expected_leaf)


# --- a whole generation ---------------------------------------------------------------------------


@struct.dataclass
class Breaks(Target):
    """A target whose logits are NaN wherever the logit of token 7 is large.

    This depends on the whole text before.
    """

    def head(self, hidden: jax.Array) -> jax.Array:
        logits = super().head(hidden)
        return jnp.where(logits[..., 7:8] > 3.4, jnp.nan, logits)


PROMPTS = np.random.default_rng(0).integers(0, 11, (8, 6))
NEW = 16


@pytest.fixture(scope="module")
def sound() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def breaks(sound) -> Breaks:
    return Breaks(**vars(sound))


def attempt(run) -> tuple[decoding.Result, dict[int, int]]:
    """Return the result of a run, and the position of the fault by row."""
    try:
        return run(), {}
    except LogitsError as error:
        assert isinstance(error.result, decoding.Result)
        return error.result, dict(zip(error.rows, error.positions, strict=True))


def options(rule: str) -> dict:
    sampling = Sampling(temperature=np.array([0.0, 0.7] * 4), top_p=0.95)
    return {
        "rule": rule,
        "sampling": sampling,
        "key": jax.random.key(3),
        "max_new_tokens": NEW,
        "eos_token_ids": (),
    }


@pytest.mark.full
@pytest.mark.thorough_except("None")
@pytest.mark.parametrize("shape", [None, "lookup", *SHAPES])
def test_a_bad_row_ends_where_plain_decoding_would_and_the_others_go_on(
    sound, breaks, shape
) -> None:
    """Check that the error names each row and position, and holds the other rows' whole texts."""
    drafters = {None: None, "lookup": PromptLookup(draft=Chain(3))}
    drafter = (
        drafters[shape]
        if shape in drafters
        else DraftModel(tiny_target(seed=5, num_layers=1), draft=SHAPES[shape])
    )
    texts = outputs(specjax.generate(sound, drafter, PROMPTS, **options("coupled")))
    result, broken = attempt(
        lambda: specjax.generate(breaks, drafter, PROMPTS, **options("coupled"))
    )
    plain, _ = expected_ends(breaks)
    assert 2 <= len(broken) <= 6
    assert broken == plain
    for row, text in enumerate(texts):
        assert outputs(result)[row] == text[: broken.get(row, len(text))], row


def expected_ends(breaks: Breaks) -> tuple[dict[int, int], list[list[int]]]:
    """Return the position of the first bad logits by row, and the texts of a sound target.

    The positions are found by reading those texts again. Rows without bad logits are left out.
    """
    sound = Target(**vars(breaks))
    texts = outputs(specjax.generate(sound, None, PROMPTS, **options("coupled")))
    logits = breaks.forward(jnp.asarray(texts))[0].logits
    is_bad = np.asarray(jnp.isnan(logits).any(-1))[:, PROMPTS.shape[1] - 1 : -1]
    return {
        row: PROMPTS.shape[1] + int(np.argmax(bad_in_row))
        for row, bad_in_row in enumerate(is_bad)
        if bad_in_row.any()
    }, texts


@pytest.mark.full
@pytest.mark.thorough_except("coupled")
@pytest.mark.parametrize("rule", ["coupled", "independent", "block", "rejection"])
def test_no_rule_says_a_word_where_there_is_none(breaks, rule) -> None:
    """Check that logits are good before each token, and bad after a row that broke.

    This holds whatever rule drew the text.
    """
    drafter = DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(3))
    result, broken = attempt(lambda: specjax.generate(breaks, drafter, PROMPTS, **options(rule)))
    assert broken
    logits = breaks.forward(jnp.asarray(result.tokens))[0].logits
    for row, length in enumerate(result.lengths):
        bad = np.asarray(jnp.isnan(logits[row]).any(-1))
        assert not bad[PROMPTS.shape[1] - 1 : length - 1].any()
        assert bad[length - 1] == (row in broken)
        assert broken.get(row, length) == length
        assert (length == PROMPTS.shape[1] + NEW) == (row not in broken)


@pytest.mark.full
@pytest.mark.thorough_except("norm", "lm_head")
@pytest.mark.parametrize("fault", ["norm", "lm_head", "embed"])
def test_broken_weights_are_an_error_at_the_first_token(sound, fault) -> None:
    """Check that NaN in a weight that every pass reads ends a row before any token.

    This holds for plain decoding and with a draft.
    """
    name = next((name for name in sound.params if fault in name), "embed")
    broken = sound.replace(
        params={
            **sound.params,
            name: jax.tree.map(lambda x: x.at[...].set(jnp.nan), sound.params[name]),
        }
    )
    for drafter in (None, PromptLookup(draft=Chain(3))):
        with pytest.raises(LogitsError, match=r"row 1: .* position 6") as caught:
            specjax.generate(broken, drafter, PROMPTS[:2], max_new_tokens=4)
        assert caught.value.rows == (0, 1)
        assert caught.value.positions == (6, 6)
        assert caught.value.result.lengths.tolist() == [6, 6]


def test_an_end_before_the_fault_is_no_error(breaks) -> None:
    """Check that a row at its limit or at an end-of-sequence token needs no more logits."""
    broken, texts = expected_ends(breaks)
    begin = PROMPTS.shape[1]
    limits = np.array([broken.get(row, begin + NEW) - begin for row in range(len(PROMPTS))])
    chosen = np.flatnonzero(limits > 0)
    assert 1 <= np.sum(limits[chosen] < NEW) < len(chosen)  # some rows go on when others have ended
    settings = options("coupled") | {"max_new_tokens": limits[chosen]}
    settings["sampling"] = Sampling(temperature=np.array([0.0, 0.7] * 4)[chosen], top_p=0.95)
    settings["key"] = decoding.GenerationOptions(key=jax.random.key(3)).row_keys(len(PROMPTS))[
        chosen
    ]
    for drafter in (None, PromptLookup(draft=Chain(3))):
        result = specjax.generate(breaks, drafter, PROMPTS[chosen], **settings)
        assert outputs(result) == [texts[row][: begin + limits[row]] for row in chosen]


def test_a_stream_yields_everything_and_then_the_error(breaks) -> None:
    whole, broken = attempt(lambda: specjax.generate(breaks, None, PROMPTS, **options("coupled")))
    results = []
    with pytest.raises(LogitsError) as caught:
        for result in specjax.stream(breaks, None, PROMPTS, **options("coupled")):
            results.append(result)
    assert dict(zip(caught.value.rows, caught.value.positions, strict=True)) == broken
    assert outputs(results[-1]) == outputs(whole) == outputs(caught.value.result)


def test_a_text_that_had_its_stop_string_is_no_error() -> None:
    """Check that a fault after a stop string is no error, and that an error keeps all texts."""
    tokenizer = of_bytes_and_spaces("llama")
    token_ids = tokenizer.encode("the a b c d", add_special_tokens=False)
    tokens, lengths = np.array([token_ids, token_ids]), np.array([len(token_ids)] * 2)
    stats = specjax.generate(tiny_target(), None, PROMPTS[:2], max_new_tokens=1).stats

    def results(rows):
        result = decoding.Result(tokens=tokens, lengths=lengths, stats=stats)
        yield result
        raise LogitsError(rows, lengths[rows].tolist(), result)

    def texts():
        return [
            GrowingText(tokenizer, token_ids[:1], ("b",)),
            GrowingText(tokenizer, token_ids[:1], ()),
        ]

    stopped = Run(results([0]), texts())
    assert len(list(stopped)) == 2
    broken = Run(results([0, 1]), texts())
    with pytest.raises(LogitsError):
        list(broken)
    assert [generation.text for generation in broken.generations] == [
        generation.text for generation in stopped.generations
    ]


@pytest.mark.full
@pytest.mark.thorough_except("chain")
@pytest.mark.parametrize("shape", ["chain", "adaptive", "dynamic", "sampled"])
def test_a_drafter_without_logits_changes_no_text(sound, shape) -> None:
    """Check that a drafter with NaN weights leaves greedy and coupled texts as they are.

    The weights are NaN for all tokens, or for some.
    """
    small = tiny_target(seed=5, num_layers=1)
    plain = outputs(specjax.generate(sound, None, PROMPTS, **options("coupled")))
    for part in (slice(None), slice(3, 5)):
        drafter = DraftModel(
            small.replace(
                params={**small.params, "embed": small.params["embed"].at[part].set(jnp.nan)}
            ),
            draft=SHAPES[shape],
        )
        assert outputs(specjax.generate(sound, drafter, PROMPTS, **options("coupled"))) == plain
        result = specjax.generate(sound, drafter, PROMPTS, **options("independent"))
        assert result.lengths.tolist() == [PROMPTS.shape[1] + NEW] * len(PROMPTS)


@pytest.mark.full
def test_the_check_is_no_pass_of_its_own() -> None:
    """Check that the check for bad logits reads the logits no second time.

    The compiled verdict reads about as many bytes with the check as without.
    """
    vocab = 20_000
    logits = jnp.zeros((2, 4, vocab))
    draft = Draft.chain(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32))
    for rows in (GREEDY.rows(2), Sampling().rows(2, "coupled")):
        keys = (
            jnp.broadcast_to(jax.random.split(jax.random.key(0), 2), (4, 2))
            if rows.coupled
            else jax.random.split(jax.random.key(0), 2)
        )

        def verdict(logits, *, with_check, rows=rows, keys=keys):
            result = verify(draft, logits, rows, keys)
            return (
                (result.count, result.token, result.bad)
                if with_check
                else (result.count, result.token)
            )

        counted = [
            jax.jit(partial(verdict, with_check=with_check))
            .lower(logits)
            .compile()
            .cost_analysis()["bytes accessed"]
            for with_check in (True, False)
        ]
        assert counted[0] < counted[1] + 0.02 * logits.nbytes


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except("plain")
@pytest.mark.parametrize("drafter", [None, PromptLookup(draft=Chain(3))], ids=["plain", "lookup"])
def test_an_engine_ends_the_bad_texts_alone_and_serves_on(breaks, drafter) -> None:
    """Check that a bad text keeps its tokens, its error names the position, and serving goes on."""
    broken, texts = expected_ends(breaks)
    keys = decoding.GenerationOptions(key=options("coupled")["key"]).row_keys(len(PROMPTS))
    sizes = {
        "rows": 8,
        "widths": (8,),
        "pages": 64,
        "page": 8,
        "chunk": 16,
        "capacity": 32,
        "steps": 4,
    }
    with Engine(breaks, drafter, **sizes) as engine:
        for _ in range(2):
            handles = []
            for row, prompt in enumerate(PROMPTS):
                sampling = {"temperature": (0.0, 0.7)[row % 2], "top_p": 0.95}
                handles.append(
                    engine.submit(
                        prompt.tolist(),
                        max_new_tokens=NEW,
                        key=keys[row],
                        eos_token_ids=(),
                        **sampling,
                    )
                )
            for row, handle in enumerate(handles):
                if row in broken:
                    with pytest.raises(EngineError, match=f"position {broken[row]} are invalid"):
                        handle.result(60.0)
                    assert handle.finish_reason == "error"
                else:
                    handle.result(60.0)
                length = broken.get(row, len(texts[row]))
                assert list(handle.tokens) == texts[row][len(PROMPTS[row]) : length]
            assert engine.state == "running"
