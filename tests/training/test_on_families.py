"""Every method that trains a drafter, for targets of the families that differ most from Llama: the loss is what the drafter
itself comes to while it drafts, and falls."""

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
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.optimizer import make_optimizer
from specjax.training.step import initial_state, name_of, train_step, trainable
from tests.models.families import zoo
from tests.training.test_drafter_methods import log_softmax
from tests.training.test_methods import batch_of

NAMES = ("gemma4 E2B", "gemma4 31B", "gpt_oss", "gemma3", "smollm3")
SIZES = ModelSizes(
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
)
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
# Layers of several sizes have no summary, and the target's last layers finish nothing where they have windows or inputs.
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
    """Where the documents begin, and the end. Each is longer than a window of 5 and a draft together.

    Layer self-attention reads keys as they are remembered, turned by their positions: what it makes of a text depends on where
    that stands, as nothing else does. So it is given one text, from position 0 on.
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
def of(tmp_path_factory):
    """The target of a name in the zoo."""

    @cache
    def make(name: str) -> Target:
        directory = tmp_path_factory.mktemp("model")
        zoo.save(name, directory)
        return Target.from_pretrained(directory, dtype=np.float32)

    return make


# --- the oracle: what a drafter expects while it drafts, from decoding's own code -----------------


@dataclass(frozen=True)
class Drafting:
    """A row that has read ``known`` tokens of the document that begins at ``begin``, and drafts: so far ``depth`` tokens of it
    below its root, which is the next one. What it expects comes behind those; ``level`` says at which level of its draft.
    """

    begin: int
    known: int
    depth: int = 0
    level: int = 0

    @property
    def expects(self) -> int:
        """Place of the token that it expects."""
        return self.begin + self.known + self.depth + self.level + 1

    @property
    def step(self) -> int:
        """Of the objective."""
        return self.depth + self.level


def draftings(method: TrainingMethod) -> Iterator[Drafting]:
    """All predictions of which the objective is made."""
    begins = begins_of(method)
    for begin, end in pairwise(begins):
        length = end - begin
        if isinstance(method, Distill):  # of the token after the root
            rows = [Drafting(begin, known) for known in range(length)]
        elif isinstance(method, MoATraining):
            # Tokens that nobody answered with are blocks of their own, and so are first ones; the rest is cut at every third.
            starts = [0]
            for i in range(1, length):
                alone = not MASK[begin + i - 1] or (begin + i) % BLOCK == 0
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
            # What the target says behind a document's last token counts, and a drafter reads no other document.
            if row.expects <= end and row.expects < len(TEXT) and MASK[row.expects - 1]:
                yield row


HOT = 8.0  # a temperature at which no probability is too small for float32


@partial(jax.jit, static_argnames="deepest")
def draft_on(target: Target, drafter: Drafter, state, tokens, following, count, root, deepest: int):
    """``[B, D, V]`` what a drafter draws from, `HOT`, below a ``root`` that it comes to by itself, and its state there."""
    reads = drafter.reads(target.config)
    kept, given = state.drafter, {"cache": state.cache.of_layers(reads)} if reads else {}
    if deepest:
        kept, entries = drafter.append_unverified(target, kept, tokens, following, count, **given)
        if reads:
            given["cache"] = given["cache"].append(entries, count, after=entries[0][0][:, 0, 0])
    keys = jax.random.split(jax.random.key(0), (drafter.draft_shape.depth, len(root)))
    hot = Sampling(temperature=HOT).rows(len(root))
    draft, _ = drafter.propose(target, kept, root, hot, keys, jnp.ones(len(root), bool), **given)
    return draft.q, kept


def while_drafting(
    target: Target, drafter: Drafter, rows: list[Drafting]
) -> tuple[np.ndarray, object]:
    """``[R, V]`` the logarithm of what is expected in each row, and the drafter's state in it.

    Every row is a text of its own, which `decoding.start` reads as a prompt. Each token below its root is then read alone, with
    what the drafter itself came to before.
    """
    deepest = max(row.depth for row in rows)
    prompts = np.zeros((len(rows), max(row.known for row in rows) + 1), int)
    drafted = np.zeros((len(rows), deepest + 1), int)  # the root, and what is below it
    for i, row in enumerate(rows):
        text = TEXT[row.begin :]
        prompts[i, : row.known + 1] = text[: row.known + 1]
        drafted[i, : row.depth + 1] = text[row.known : row.known + row.depth + 1]
    known, count = (
        np.array([row.known for row in rows]),
        np.array([row.depth for row in rows], np.int32),
    )
    options = GenerationOptions(max_new_tokens=8, eos_token_ids=())
    drafter, state = decoding.start(target, drafter, prompts, known + 1, options)
    roots = drafted[np.arange(len(rows)), count]
    q, kept = draft_on(
        target, drafter, state, drafted[:, :-1], drafted[:, 1:], count, roots, deepest
    )
    levels = np.array([row.level for row in rows])
    with np.errstate(divide="ignore"):  # of tokens that cannot be drafted
        return (
            log_softmax(HOT * np.log(np.asarray(q, np.float64)[np.arange(len(rows)), levels])),
            kept,
        )


@jax.jit
def said_by(target: Target, texts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``[T, B, H]`` the target's hidden states after each token of ``texts [B, T]``, and ``[T, B, V]`` its logits: read one by
    one."""

    def read(cache, token):
        output, cache = target.forward(token[:, None], cache)
        return cache, (output.hidden[:, 0], output.logits[:, 0])

    return jax.lax.scan(read, target.new_cache(*texts.shape), texts.T)[1]


def smooth_l1(gap: np.ndarray) -> np.ndarray:
    gap = np.abs(gap)
    return np.where(gap < 1, gap**2 / 2, gap - 0.5).mean(-1)


def slow_loss(method: TrainingMethod, target: Target, student) -> float:
    """The objective's formula over what the drafter expects while it drafts."""
    rows = list(draftings(method))
    said = said_by(target, jnp.asarray(TEXT.reshape(len(begins_of(method)) - 1, -1)))
    hidden, logits = (
        np.asarray(part, np.float64).swapaxes(0, 1).reshape(len(TEXT), -1) for part in said
    )
    before = np.array([row.expects for row in rows]) - 1  # where the target has said the same
    p = np.exp(log_softmax(logits[before]))
    step = np.array([row.step for row in rows])
    if isinstance(method, Distill):
        student = DraftModel(student)
    drafter = student.replace(draft=Chain(HEADS if isinstance(method, MedusaTraining) else 1))
    log_q, state = while_drafting(target, drafter, rows)
    cross = -(p * log_q).sum(-1)
    if isinstance(method, Distill):
        each = cross + (p * np.log(p)).sum(-1)
    elif isinstance(method, HassTraining | Eagle1Training):
        states = np.asarray(state.newest[:, 0])
        each = smooth_l1(states - hidden[before]) + 0.1 * cross
        if isinstance(method, HassTraining):
            best = np.argsort(-p, axis=-1)[:, : method.top_k]
            each = (each - np.take_along_axis(p * log_q, best, -1).sum(-1)) / STEPS
    elif isinstance(method, Eagle3Training):
        ids = np.asarray(student.vocabulary(target).ids)
        within = np.exp(log_softmax(logits[before][:, ids]))
        can_be_drafted = np.isin(logits[before].argmax(-1), ids)
        assert 0 < can_be_drafted.sum() < len(rows)
        each = -(within * log_q[:, ids]).sum(-1) * can_be_drafted * method.decay**step
    elif isinstance(method, MTPTraining):
        each = -log_q[np.arange(len(rows)), TEXT[before + 1]] / STEPS
    else:
        weight = method.decay ** (step + 1) if isinstance(method, MedusaTraining) else 1.0
        each = cross * weight
    return each.sum() / len(MASK)


# --- a few steps of training ----------------------------------------------------------------------


def begin(method: TrainingMethod, target: Target):
    """A student with weights so large that every key, position and state matters; heads are left as they are."""
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
    """A student after a few steps: its first loss is that of its drafts, and falls; all that is learnt moves, and no more."""
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
    before, after = (jax.tree_util.tree_leaves_with_path(each) for each in (student, state.student))
    # Decay is off, and Adam takes a step wherever there is a gradient.
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
@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case not in LEARNS_OFTEN))
        for case in LEARNS
    ],
)
def test_a_method_learns_what_its_drafter_does(of, method, name) -> None:
    learn(METHODS[method], of(name))


def check_refused(method: TrainingMethod, target: Target) -> None:
    """Before anything is trained, and by a dry run too."""
    with pytest.raises(InputError) as caught:
        abstract_run(TrainConfig(method=method), target=target)
    assert re.fullmatch(
        r"(target: layer self-attention|drafter: target layer inference) .*: give .*",
        str(caught.value),
    )


@pytest.mark.parametrize(("method", "name"), REFUSED)
def test_what_a_method_cannot_learn_from_is_refused_in_a_line(of, method, name) -> None:
    check_refused(METHODS[method], of(name))
