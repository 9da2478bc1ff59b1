"""Every method that trains a drafter, for the families that differ most from Llama.

The loss must be the one that follows from the drafter's own predictions while it drafts, and it
must fall.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Drafter, DraftModel
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from specjax.training.config import OptimizerConfig, TrainConfig
from specjax.training.contract import StudentInputs, TrainingMethod
from specjax.training.dry_run import abstract_run
from specjax.training.methods import (
    Distill,
    Eagle1Training,
    Eagle3Training,
    HassTraining,
    MedusaTraining,
    MoATraining,
    MTPTraining,
)
from specjax.training.optimizer import make_optimizer
from specjax.training.step import initial_state, name_of, train_step, trainable
from tests.models.families import zoo
from tests.training.sizes import SIZES
from tests.training.test_drafter_methods import log_softmax
from tests.training.test_methods import batch_of

NAMES = ("gemma4 E2B", "gemma4 31B", "gpt_oss", "gemma3", "smollm3")
STEPS, HEADS, BLOCK = 3, 3, 3
METHODS: dict[str, TrainingMethod] = {
    "eagle1": Eagle1Training(target="here", noise=0.0),
    "hass": HassTraining(target="here", noise=0.0, steps=STEPS, top_k=3),
    "eagle3": Eagle3Training(target="here", steps=STEPS, draft_vocab_size=25),
    "mtp": MTPTraining(target="here", steps=STEPS),
    "medusa": MedusaTraining(target="here", heads=HEADS, labels="target"),
    "moa": MoATraining(
        target="here",
        shortest_block=BLOCK,
        longest_block=BLOCK,
        staircase_until=0.0,
        feature_weight=0.0,
    ),
    "distill": Distill(target="here", model=SIZES),
}
METHODS["moa without lsa"] = MoATraining(**vars(METHODS["moa"]) | {"lsa": False})
METHODS["moa with tli"] = MoATraining(**vars(METHODS["moa"]) | {"lsa": False, "tli": 1})
# Layers of several sizes have no summary. The target's last layers cannot finish a draft if they
# have windows or inputs of their own.
REFUSED = [
    ("moa", "gemma4 E2B"),
    ("moa", "gemma4 31B"),
    ("moa with tli", "gemma4 E2B"),
    ("moa with tli", "gemma3"),
]
LEARNS = [(method, name) for method in METHODS for name in NAMES if (method, name) not in REFUSED]
LEARNS_OFTEN = [
    ("eagle1", "gemma4 31B"),
    ("hass", "smollm3"),
    ("eagle3", "gemma4 E2B"),
    ("mtp", "gemma3"),
    ("medusa", "gemma4 31B"),
    ("moa without lsa", "gemma4 E2B"),
    ("moa with tli", "gpt_oss"),
    ("distill", "gpt_oss"),
]

TEXT = np.random.default_rng(2).integers(0, zoo.VOCABULARY, 20)
MASK = np.arange(19) % 6 != 0  # label 0 and three more do not count


def begins_of(method: TrainingMethod) -> tuple[int, ...]:
    """Return where the documents begin, and the end of the last one.

    Each document is longer than a window of 5 and a draft together. Layer self-attention reads keys
    as they are stored, turned by their positions, so that its output depends on where a text
    stands. No other method does so. Therefore it has one text, which begins at position 0.
    """
    return (0, 20) if isinstance(method, MoATraining) and method.lsa else (0, 10, 20)


def batch_for(method: TrainingMethod) -> dict:
    begins = begins_of(method)
    documents = [TEXT[begin:end].tolist() for begin, end in pairwise(begins)]
    return {
        **batch_of(documents, MASK.tolist()),
        "key": jax.random.key(0),
        "progress": jnp.ones(()),
    }


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """Return a function that makes the target of a name in the zoo."""

    @cache
    def make(name: str) -> Target:
        directory = tmp_path_factory.mktemp("model")
        zoo.save(name, directory)
        return Target.from_pretrained(directory, dtype=np.float32)

    return make


# --- the oracle: what a drafter predicts while it drafts, from decoding's own code ----------------


@dataclass(frozen=True)
class Drafting:
    """A row that has read part of a document, and drafts.

    Attributes:
        begin: where the document begins.
        read: the number of tokens of the document that it has read. The next one is the root.
        depth: the number of tokens below the root that it has drafted so far.
        level: the level of the draft that it predicts, counted from those tokens.
    """

    begin: int
    read: int
    depth: int = 0
    level: int = 0

    @property
    def expects(self) -> int:
        """The place of the token that it predicts."""
        return self.begin + self.read + self.depth + self.level + 1

    @property
    def step(self) -> int:
        """The step of the objective."""
        return self.depth + self.level


def draftings(method: TrainingMethod) -> Iterator[Drafting]:
    """Yield all predictions that the objective consists of."""
    begins = begins_of(method)
    for begin, end in pairwise(begins):
        length = end - begin
        if isinstance(method, Distill):  # it predicts the token after the root
            rows = [Drafting(begin, read) for read in range(length)]
        elif isinstance(method, MoATraining):
            # A token that is not part of an answer is a block of its own, and so is a first token.
            # The rest of a document is cut at every third token of it.
            starts = [0]
            for i in range(1, length):
                alone = not MASK[begin + i - 1] or i % BLOCK == 0
                starts.append(i if alone else starts[-1])
            rows = [Drafting(begin, start, i - start) for i, start in enumerate(starts)]
        elif isinstance(method, MedusaTraining):
            rows = [
                Drafting(begin, 1 + place, level=head)
                for place in range(length)
                for head in range(HEADS)
            ]
        else:
            steps = 1 if isinstance(method, Eagle1Training) else STEPS
            rows = [
                Drafting(begin, 1 + place, step) for place in range(length) for step in range(steps)
            ]
        for row in rows:
            # The target's prediction after a document's last token counts. A drafter reads no other
            # document.
            if row.expects <= end and row.expects < len(TEXT) and MASK[row.expects - 1]:
                yield row


HOT = 8.0
"""A temperature at which no probability is too small for float32."""


@partial(jax.jit, static_argnames="deepest")
def draft_on(target: Target, drafter: Drafter, state, tokens, following, count, root, deepest: int):
    """Return ``[B, D, V]`` the distribution at `HOT` below ``root``, and the drafter's state there.

    The drafter reads the tokens above the root with its own states.
    """
    reads = drafter.reads(target.config)
    drafter_state = state.drafter
    options = {"cache": state.cache.of_layers(reads)} if reads else {}
    if deepest:
        drafter_state, entries = drafter.append_unverified(
            target, drafter_state, tokens, following, count, **options
        )
        if reads:
            options["cache"] = options["cache"].append(entries, count, after=entries[0][0][:, 0, 0])
    keys = jax.random.split(jax.random.key(0), (drafter.draft_shape.depth, len(root)))
    hot = Sampling(temperature=HOT).rows(len(root))
    draft, _ = drafter.propose(
        target, drafter_state, root, hot, keys, jnp.ones(len(root), bool), **options
    )
    return draft.q, drafter_state


def while_drafting(
    target: Target, drafter: Drafter, rows: list[Drafting]
) -> tuple[np.ndarray, object]:
    """Return ``[R, V]`` log-probabilities of each row's prediction, and the drafter's states.

    Every row is a separate text, which `decoding.start` reads as a prompt. Each token below its
    root is then read alone, with the drafter's own states before it.
    """
    deepest = max(row.depth for row in rows)
    prompts = np.zeros((len(rows), max(row.read for row in rows) + 1), int)
    drafted = np.zeros((len(rows), deepest + 1), int)  # the root, and what is below it
    for i, row in enumerate(rows):
        text = TEXT[row.begin :]
        prompts[i, : row.read + 1] = text[: row.read + 1]
        drafted[i, : row.depth + 1] = text[row.read : row.read + row.depth + 1]
    lengths = np.array([row.read for row in rows])
    count = np.array([row.depth for row in rows], np.int32)
    options = GenerationOptions(max_new_tokens=8, eos_token_ids=())
    drafter, state = decoding.start(target, drafter, prompts, lengths + 1, options)
    roots = drafted[np.arange(len(rows)), count]
    q, drafter_state = draft_on(
        target, drafter, state, drafted[:, :-1], drafted[:, 1:], count, roots, deepest
    )
    levels = np.array([row.level for row in rows])
    predicted = np.asarray(q, np.float64)[np.arange(len(rows)), levels]
    with np.errstate(divide="ignore"):  # tokens that cannot be drafted have probability 0
        return log_softmax(HOT * np.log(predicted)), drafter_state


@jax.jit
def target_outputs(target: Target, texts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Read ``texts [B, T]`` token by token.

    Returns the target's hidden states ``[T, B, H]`` and its logits ``[T, B, V]`` after each token.
    """

    def read(cache, token):
        output, cache = target.forward(token[:, None], cache)
        return cache, (output.hidden[:, 0], output.logits[:, 0])

    return jax.lax.scan(read, target.new_cache(*texts.shape), texts.T)[1]


def smooth_l1(gap: np.ndarray) -> np.ndarray:
    gap = np.abs(gap)
    return np.where(gap < 1, gap**2 / 2, gap - 0.5).mean(-1)


def slow_loss(method: TrainingMethod, target: Target, student) -> float:
    """Compute the objective's formula from what the drafter predicts while it drafts."""
    rows = list(draftings(method))
    outputs = target_outputs(target, jnp.asarray(TEXT.reshape(len(begins_of(method)) - 1, -1)))
    hidden, logits = (
        np.asarray(part, np.float64).swapaxes(0, 1).reshape(len(TEXT), -1) for part in outputs
    )
    before = np.array([row.expects for row in rows]) - 1  # the target predicts the token here
    p = np.exp(log_softmax(logits[before]))
    step = np.array([row.step for row in rows])
    if isinstance(method, Distill):
        student = DraftModel(student)
    drafter = student.replace(draft=Chain(HEADS if isinstance(method, MedusaTraining) else 1))
    log_q, state = while_drafting(target, drafter, rows)
    cross = -(p * log_q).sum(-1)
    if isinstance(method, Distill):
        terms = cross + (p * np.log(p)).sum(-1)
    elif isinstance(method, HassTraining | Eagle1Training):
        states = np.asarray(state.newest[:, 0])
        terms = smooth_l1(states - hidden[before]) + 0.1 * cross
        if isinstance(method, HassTraining):
            best = np.argsort(-p, axis=-1)[:, : method.top_k]
            terms = (terms - np.take_along_axis(p * log_q, best, -1).sum(-1)) / STEPS
    elif isinstance(method, Eagle3Training):
        ids = np.asarray(student.vocabulary(target).ids)
        within = np.exp(log_softmax(logits[before][:, ids]))
        can_be_drafted = np.isin(logits[before].argmax(-1), ids)
        assert 0 < can_be_drafted.sum() < len(rows)
        terms = -(within * log_q[:, ids]).sum(-1) * can_be_drafted * method.decay**step
    elif isinstance(method, MTPTraining):
        terms = -log_q[np.arange(len(rows)), TEXT[before + 1]] / STEPS
    else:
        weight = method.decay ** (step + 1) if isinstance(method, MedusaTraining) else 1.0
        terms = cross * weight
    return terms.sum() / len(MASK)


# --- a few steps of training ----------------------------------------------------------------------


def begin(method: TrainingMethod, target: Target):
    """Return a student with weights so large that every key, position and state matters.

    Heads stay as they are.
    """
    stand_in = tokenizers.Tokenizer(tokenizers.models.BPE())
    counts = np.arange(zoo.VOCABULARY)
    student = method.init(jax.random.key(1), StudentInputs(stand_in, counts, target))
    rng = np.random.default_rng(0)

    def larger(path, leaf):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or any(
            part in name for part in ("lm_head", "output", "embed")
        ):
            return leaf
        noise = rng.normal(0, 0.2, leaf.shape)
        return jnp.asarray(leaf * 5 + noise if leaf.ndim == 2 else leaf + noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(larger, student)


def learn(trained: TrainingMethod, target: Target):
    """Return a student after a few steps, and check what it learnt.

    The first loss is that of its drafts, and falls. Exactly the trainable parameters move.
    """
    student = begin(trained, target)
    expected = slow_loss(trained, target, student)
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=3e-3, warmup_steps=1, weight_decay=0.0), 10
    )
    state, batch, losses = initial_state(trained, student, optimizer), batch_for(trained), []
    for _ in range(8):
        state, metrics = train_step(state, batch, target, method=trained, optimizer=optimizer)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], expected, rtol=1e-4)
    assert losses[-1] < 0.95 * losses[0]
    learnt = {
        name_of(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(trainable(student, trained))
    }
    before, after = (
        jax.tree_util.tree_leaves_with_path(leaves) for leaves in (student, state.student)
    )
    # Decay is off, and Adam moves every parameter that has a gradient.
    moved = {
        name_of(path)
        for (path, old), (_, new) in zip(before, after, strict=True)
        if not np.array_equal(old, new)
    }
    assert moved == learnt
    if isinstance(trained, Eagle3Training):
        assert {name_of(path) for path, _ in before} - learnt == {"params.d2t"}
    return state.student


@pytest.mark.full
@pytest.mark.thorough_except("eagle1-gemma4 31B", "hass-smollm3")
@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case not in LEARNS_OFTEN))
        for case in LEARNS
    ],
)
def test_a_method_learns_what_its_drafter_does(target_of, method, name) -> None:
    learn(METHODS[method], target_of(name))


def check_refused(method: TrainingMethod, target: Target) -> None:
    """Check that the run is refused before training, by a dry run too."""
    with pytest.raises(InputError) as caught:
        abstract_run(TrainConfig(method=method), target=target)
    assert re.fullmatch(
        r"(target: layer self-attention|drafter: target layer inference) .*: give .*",
        str(caught.value),
    )


@pytest.mark.parametrize(("method", "name"), REFUSED)
def test_what_a_method_cannot_learn_from_is_refused_in_a_line(target_of, method, name) -> None:
    check_refused(METHODS[method], target_of(name))
