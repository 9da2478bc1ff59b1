"""The objectives of drafters of whole blocks, against blocks drafted one by one with a cache."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.drafters import DFlash, DFlash2, DSpark
from specjax.models.transformer import Target
from specjax.training.contract import StudentInputs
from specjax.training.methods import (
    DFlash2Training,
    DFlashTraining,
    DSparkTraining,
    JetSpecTraining,
)
from specjax.training.objectives import blocks
from specjax.training.objectives.ahead import counted
from specjax.training.objectives.blocks import at_all_places, draw_places, read_blocks
from specjax.training.objectives.windows import score
from tests.conftest import tiny_target
from tests.drafters import block_oracles
from tests.rounding import moved_by_last_bits
from tests.training.test_drafter_methods import log_softmax, losses_of_acceptance
from tests.training.test_methods import batch_of

DOCUMENTS = [[1, 2, 3, 4, 9, 3, 1, 4, 4], [5, 6, 7, 8, 2]]
MASK = [0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
BATCH = {**batch_of(DOCUMENTS, MASK), "key": jax.random.key(0)}
TARGET = tiny_target()
SIZE = 4
WINDOWED = {"sliding_window": 3, "windowed_layers": (0,)}
STUDENTS = {
    "dflash": lambda target: DFlash.init(target, jax.random.key(1), block_size=SIZE, num_layers=2),
    "jetspec": lambda target: DFlash.init(
        target, jax.random.key(1), block_size=SIZE, num_layers=2, variant={"causal": True}
    ),
    "windows of blocks": lambda target: DFlash.init(
        target,
        jax.random.key(1),
        block_size=SIZE,
        num_layers=2,
        variant={"window_of_block": True, "causal_in_window": True},
        **WINDOWED,
    ),
    "windows of tokens": lambda target: DFlash.init(
        target, jax.random.key(1), block_size=SIZE, num_layers=2, **WINDOWED
    ),
    "dspark": lambda target: DSpark.init(
        target, jax.random.key(1), block_size=SIZE - 1, markov_rank=3
    ),
    "dspark rnn": lambda target: DSpark.init(
        target, jax.random.key(1), block_size=SIZE - 1, markov_rank=3, markov="rnn"
    ),
    "dflash2": lambda target: DFlash2.init(
        target, jax.random.key(1), block_size=SIZE, num_layers=2, **SELECTOR
    ),
    "dflash2 factors": lambda target: DFlash2.init(
        target, jax.random.key(1), block_size=SIZE, num_layers=2, variant=FACTORS, **SELECTOR
    ),
    "dflash factors": lambda target: DFlash.init(
        target, jax.random.key(1), block_size=SIZE, num_layers=2, variant=FACTORS
    ),
}
FACTORS: dict[str, Any] = {
    "input_embedding_scale": 1.6,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 4.0,
}
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}
DEPTH = SIZE - 1


def strong(drafter):
    """Return the drafter with larger matrices and kernels, none of them zero."""
    leaves, tree = jax.tree.flatten(drafter.params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    grown = [
        x + jax.random.normal(key, x.shape) * 0.3 if x.ndim > 1 else x
        for key, x in zip(keys, leaves, strict=True)
    ]
    return drafter.replace(params=jax.tree.unflatten(tree, grown))


@pytest.fixture(params=STUDENTS, scope="module")
def student(request):
    return strong(STUDENTS[request.param](TARGET))


def place_of(place: int) -> tuple[list[int], int] | None:
    """Return the document at a place of the batch, and how many tokens have been read there."""
    for document in DOCUMENTS:
        if place < len(document):
            return document, place + 1
        place -= len(document)
    return None


@jax.jit
def block_after(target, student, text, read, root):
    """Return the states ``[D, H]`` of the block below ``root [1]``.

    ``read [1]`` tokens of ``text [1, n]`` have been read.
    """
    output, _ = target.read(text, taps=student.taps(target.config))
    state = student.start(target, 1, 16)
    entries = student.context(student.features(output), jnp.arange(text.shape[1])[None])
    return student.block(target, state.append(entries, read, after=output.hidden), root)[0, -DEPTH:]


def drafted(student, place, target=TARGET):
    document, read = place_of(place)
    padded = jnp.asarray([document + [0] * (9 - len(document))])
    return np.asarray(
        block_after(target, student, padded, jnp.array([read]), padded[0, read][None])
    )


def every_block(student, output):
    return at_all_places(lambda places, states: states, student, TARGET, BATCH, output)


@pytest.mark.full_except("dflash", "dspark rnn")
@pytest.mark.thorough_except("jetspec")
@pytest.mark.kills_alone("blocks-hang-from-the-token-before, blocks-read-one-token-too-far")
def test_blocks_are_what_the_drafter_writes(student) -> None:
    """Check every place that has an anchor, whatever other blocks are read with it."""
    output, _ = score(TARGET, BATCH, student.taps(TARGET.config))
    places = jnp.asarray([[11, 0, 3, 6, 2, 9]])
    few = np.asarray(read_blocks(student, TARGET, BATCH, output, places)[0])
    every = np.asarray(every_block(student, output)[0])
    compared = 0
    for place in range(13):
        if place in (8, 13):  # the last place of a document: its block would begin in the next one
            continue
        expected = drafted(student, place)
        np.testing.assert_allclose(every[place], expected, atol=1e-4)
        if place in places[0].tolist():
            np.testing.assert_allclose(few[places[0].tolist().index(place)], expected, atol=1e-4)
        compared += 1
    assert compared == 12


def test_an_evaluation_in_chunks_is_that_of_all_at_once(monkeypatch) -> None:
    student = strong(STUDENTS["dflash"](TARGET))
    output, _ = score(TARGET, BATCH, student.taps(TARGET.config))
    whole = every_block(student, output)
    monkeypatch.setattr(blocks, "_CHUNK", 5)
    np.testing.assert_allclose(every_block(student, output), whole, atol=1e-5)


def counted_depths() -> dict[int, int]:
    """Return for each place how many depths count: the depths before the first that does not."""
    depths = {}
    for place in range(13):
        depth = 0
        while depth < DEPTH and bool(counted(BATCH, depth)[0, place]):
            depth += 1
        depths[place] = depth
    return depths


METHODS = {
    "dflash": (DFlashTraining(target="here", gamma=2.0), "dflash"),
    "dflash target": (DFlashTraining(target="here", gamma=2.0, labels="target"), "dflash"),
    "dflash dpace": (DFlashTraining(target="here", dpace=0.5), "dflash"),
    "jetspec": (JetSpecTraining(target="here", temperature=2.0), "jetspec"),
    "dspark": (DSparkTraining(target="here", gamma=3.0), "dspark"),
    "dspark rnn": (DSparkTraining(target="here", markov="rnn", gamma=3.0), "dspark rnn"),
    "dflash2": (DFlash2Training(target="here", gamma=2.0, selector_weight=0.6), "dflash2"),
    "dflash2 target": (DFlash2Training(target="here", gamma=2.0, labels="target"), "dflash2"),
    "dflash2 dpace": (DFlash2Training(target="here", dpace=0.5), "dflash2"),
    "dflash2 factors": (
        DFlash2Training(target="here", gamma=2.0, selector_weight=0.6),
        "dflash2 factors",
    ),
}


class Prediction(NamedTuple):
    """The prediction of a drafter at one depth of a block that it has drafted alone."""

    theirs: np.ndarray  # [V] the target's logits
    logits: np.ndarray  # [V] the drafter's logits
    label: int
    confidence: float  # the output of the confidence head
    before: int  # the token before
    state: np.ndarray  # [H] the state that the logits come from


def predictions(student, target=TARGET) -> Iterator[list[Prediction]]:
    """Yield for each block that counts the predictions at the depths that count."""
    theirs = np.asarray(score(target, BATCH)[0].logits[0], np.float64)
    tokens = np.asarray(BATCH["tokens"][0])
    for place, depths in counted_depths().items():
        if not depths:
            continue
        states = jnp.asarray(drafted(student, place, target))
        logits = np.asarray(student.logits(target, states), np.float64)
        confidences = [0.0] * DEPTH
        if isinstance(student, DSpark):
            memory = student.markov_memory((1,))
            for d in range(DEPTH):
                before = jnp.asarray([tokens[min(place + 1 + d, 13)]])
                after, memory, confidence = student.after(
                    jnp.asarray(logits[d])[None], states[d][None], before, memory
                )
                logits[d], confidences[d] = np.asarray(after[0], np.float64), float(confidence[0])
        yield [
            Prediction(
                theirs[place + 1 + d],
                logits[d],
                tokens[place + 2 + d],
                confidences[d],
                tokens[place + 1 + d],
                states[d],
            )
            for d in range(depths)
        ]


def slow_loss(method, student, target=TARGET) -> tuple[float, int]:
    """Compute the objective's formula over blocks drafted one by one.

    Returns the loss, and how many labels are not among a selector's candidates. All 13 places have
    anchors; an anchor counts if its first token does.
    """
    expected, lacking = 0.0, 0
    for block in predictions(student, target):
        right = [softmax(prediction.logits)[prediction.label] for prediction in block]
        if isinstance(student, DFlash2):
            selected = [slow_selector(student, prediction, method.labels) for prediction in block]
            lacking += sum(was_lacking for _, was_lacking in selected)
            entropies = [entropy for entropy, _ in selected]
            weights = weights_of(method, [np.exp(-entropy) for entropy in entropies])
            expected += method.selector_weight * np.dot(weights, entropies)
        for d, (theirs, logits, label, confidence, *_) in enumerate(block):
            log_p, log_q = log_softmax(theirs), log_softmax(logits)
            p, q = np.exp(log_p), np.exp(log_q)
            if isinstance(method, JetSpecTraining):
                log_p, log_q = log_softmax(theirs / 2), log_softmax(logits / 2)
                expected += 4 * np.exp(log_p) @ (log_p - log_q)
            elif isinstance(method, DSparkTraining):
                expected += np.exp(-d / 3) * (
                    -0.1 * log_q[label]
                    + 0.9 * np.abs(p - q).sum()
                    + confidence_loss(p, q, confidence)
                )
            elif method.labels == "target":
                expected -= np.exp(-d / 2) * (p @ log_q)
            else:
                expected -= weights_of(method, right)[d] * log_q[label]
    return expected / (13 * DEPTH), lacking


@pytest.mark.full
@pytest.mark.thorough_except("dflash")
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_its_formula_summed_over_blocks_drafted_one_by_one(name) -> None:
    method, kind = METHODS[name]
    student = strong(STUDENTS[kind](TARGET))
    loss, metrics = jax.jit(method.objective)(student, BATCH, TARGET)
    expected, lacking = slow_loss(method, student)
    np.testing.assert_allclose(loss, expected, rtol=2e-4)
    assert {"loss"} <= set(metrics)
    if isinstance(student, DFlash2):
        # A label that is no candidate is added to the candidates.
        assert 0 < lacking < sum(counted_depths().values())
        assert {"token_loss", "selector_loss"} <= set(metrics)


def weights_of(method, chances: list[float]) -> list[float]:
    """Return the weight of each depth.

    ``chances`` are the probabilities that the drafter gives the right token.
    """
    if method.dpace < 0:
        return [np.exp(-d / method.gamma) for d in range(len(chances))]
    smooth = [(1 - method.dpace) * chance + method.dpace for chance in chances]
    return [
        sum(np.prod(smooth[: m + 1]) for m in range(d, len(chances))) for d in range(len(chances))
    ]


def slow_selector(student, prediction: Prediction, labels: str) -> tuple[float, bool]:
    """Compute the cross entropy of the right token among the candidates.

    Returns also whether the token had to be added to the candidates.
    """
    logits, before = prediction.logits, prediction.before
    label = prediction.theirs.argmax() if labels == "target" else prediction.label
    best = np.argsort(-logits)[: student.config.selector_top_k].tolist()
    lacks = label not in best
    if lacks:
        best[-1] = label
    codes = {
        name: np.asarray(student.params[name], np.float64)
        for name in ("predecessors", "successors", "selector")
    }
    context = codes["predecessors"][before] * (
        np.asarray(prediction.state, np.float64) @ codes["selector"]
    )
    scores = np.array([logits[token] + codes["successors"][token] @ context for token in best])
    return -log_softmax(scores)[best.index(label)], lacks


OF_ACCEPTANCE = {
    "dflash hybrid": (
        DFlashTraining(target="here", gamma=2.0, labels="target", loss="hybrid"),
        "dflash",
    ),
    "dflash text hybrid": (DFlashTraining(target="here", gamma=2.0, loss="hybrid"), "dflash"),
    "dflash dpace acceptance": (
        DFlashTraining(target="here", dpace=0.5, labels="target", loss="acceptance"),
        "dflash",
    ),
    "jetspec acceptance": (
        JetSpecTraining(target="here", temperature=2.0, loss="acceptance"),
        "jetspec",
    ),
    "jetspec hybrid": (JetSpecTraining(target="here", loss="hybrid", eta=1.0), "jetspec"),
    "dspark hybrid": (DSparkTraining(target="here", gamma=3.0, loss="hybrid"), "dspark"),
    "dspark acceptance": (DSparkTraining(target="here", gamma=3.0, loss="acceptance"), "dspark"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OF_ACCEPTANCE)
def test_a_loss_of_acceptance_is_its_formula_too(name) -> None:
    """Check that a hybrid loss has its own share at each depth, by the blocks that reach it."""
    method, kind = OF_ACCEPTANCE[name]
    student = strong(STUDENTS[kind](TARGET))
    heat = method.temperature if isinstance(method, JetSpecTraining) else 1.0
    expected, pairs, weights = 0.0, [[] for _ in range(DEPTH)], [[] for _ in range(DEPTH)]
    for block in predictions(student):
        chances = [
            np.minimum(softmax(prediction.theirs), softmax(prediction.logits)).sum()
            for prediction in block
        ]
        for d, (theirs, logits, label, confidence, *_) in enumerate(block):
            by_kind = {"dflash": np.exp(-d / 2), "jetspec": 1.0, "dspark": 0.9 * np.exp(-d / 3)}
            weight = by_kind[kind]
            if name == "dflash dpace acceptance":
                weight = weights_of(method, chances)[d]
            target_logits = (
                np.where(np.arange(11) == label, 1e3, 0.0)
                if name == "dflash text hybrid"
                else theirs / heat
            )
            if kind == "dspark":
                p, q = softmax(theirs), softmax(logits)
                expected += np.exp(-d / 3) * (
                    -0.1 * np.log(q[label]) + confidence_loss(p, q, confidence)
                )
            pairs[d].append((target_logits, np.arange(11), logits / heat))
            weights[d].append(weight)
    for of_depth, weight in zip(pairs, weights, strict=True):
        expected += np.dot(weight, losses_of_acceptance(method.loss, of_depth, method.eta))
    np.testing.assert_allclose(
        jax.jit(method.objective)(student, BATCH, TARGET)[0], expected / (13 * DEPTH), rtol=2e-4
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits))


def confidence_loss(p: np.ndarray, q: np.ndarray, confidence: float) -> float:
    acceptance = np.minimum(p, q).sum()
    chance = sigmoid(confidence)
    return -acceptance * np.log(chance) - (1 - acceptance) * np.log(1 - chance)


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


@pytest.mark.full
def test_the_sum_over_blocks_is_that_of_speculators(tmp_path) -> None:
    """Compare sums: speculators divides by the places that count, and specjax by all places."""
    block_oracles.needs_speculators()
    text = block_oracles.make_text(tmp_path / "target")
    target = Target.from_pretrained(text.directory, dtype=np.float32)
    count = len(text.tokens)
    mask = np.zeros(count, bool)
    mask[5:14] = True
    for kind, method, options in (
        (
            "dflash",
            DFlashTraining(target="here", gamma=4.0, labels="target"),
            {"losses": {"kl_div": 1.0}},
        ),
        (
            "dspark",
            DSparkTraining(target="here", gamma=4.0, token_weight=0.0),
            {"losses": {"tv": 1.8}},
        ),
        (
            "dflash2",
            DFlash2Training(target="here", gamma=4.0, labels="target", selector_weight=0.6),
            {"losses": {"kl_div": 1.0}, "selector_loss_alpha": 0.6},
        ),
    ):
        selector = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
        heads = {"dspark": {"markov_rank": 6}, "dflash2": selector}.get(kind, {})
        model = block_oracles.make_drafter(tmp_path / kind, kind, text, block_size=5, **heads)
        theirs = block_oracles.speculators_loss(model, text, mask, gamma=4.0, **options)
        student = method.kind.from_pretrained(tmp_path / kind, dtype=np.float32)
        first = 0 if kind == "dspark" else 1
        # In speculators the anchors are the tokens under the mask. A slot of a block counts if its
        # own token is under the mask.
        output, _ = target.score(jnp.asarray(text.tokens[None]), taps=student.taps(target.config))
        anchors = np.flatnonzero(mask[:-5])
        total = places = 0.0
        batch = {
            "tokens": jnp.asarray(np.append(text.tokens, 0)[None]),
            "segments": jnp.zeros((1, count + 1), int),
        }
        states = read_blocks(student, target, batch, output, jnp.asarray(anchors[None] - 1))
        for row, anchor in enumerate(anchors):
            slots = range(first, 5)
            counts = np.array([mask[anchor + slot] for slot in slots])
            after = anchor + np.arange(5 - first)
            tokens = jnp.asarray(text.tokens)
            piece = blocks.DraftedBlocks(
                states[:, row : row + 1],
                output.hidden[:, after][:, None],
                tokens[np.minimum(after + 1, count - 1)][None, None],
                tokens[after][None, None],
                jnp.asarray(counts)[None, None],
            )
            terms = method.terms(method.each(student, target, piece), piece.valid)
            sums = [jnp.sum(jnp.where(counts, term[0, 0], 0.0)) for term in terms.values()]
            total += sum(map(float, sums))
            if kind != "dspark":  # a cross entropy and a KL differ by the target's own entropy
                p = np.asarray(jax.nn.softmax(output.logits[0, after]), np.float64)
                weights = np.exp(-np.arange(4) / 4.0)
                total += float(np.sum(counts * weights * np.sum(p * np.log(p), axis=-1)))
            places += counts.sum()
        np.testing.assert_allclose(total / places, theirs, rtol=1e-3)


@pytest.mark.full
@pytest.mark.thorough_except("dflash", "jetspec")
@pytest.mark.parametrize("name", ["dflash", "jetspec", "dspark", "dspark rnn", "dflash2"])
def test_gradients_reach_every_parameter_and_the_loss_falls(name) -> None:
    method, kind = METHODS[name]
    student = strong(STUDENTS[kind](TARGET))

    def loss(params, method=method):
        return method.objective(student.replace(params=params), BATCH, TARGET)[0]

    differentiate = jax.jit(jax.value_and_grad(loss))
    value, gradient = differentiate(student.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 1e-6, path
    moved = jax.tree.map(lambda x, g: x - 0.005 * g, student.params, gradient)
    assert loss(moved) < value
    again = jax.grad(lambda p: loss(p, dataclasses.replace(method, remat=True)))(student.params)
    tolerance = max(
        1e-5, moved_by_last_bits(lambda params: differentiate(params)[1], student.params)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), again, gradient)


@pytest.mark.full
def test_a_loss_of_acceptance_raises_it() -> None:
    """Check the chance that drafts are accepted after a few steps of plain gradient descent."""
    method = DFlashTraining(target="here", labels="target", loss="acceptance", gamma=0.0)
    student = DFlash.init(TARGET, jax.random.key(1), block_size=SIZE, num_layers=1)
    batch = {**batch_of([[1, 2, 3, 4, 9, 3, 1, 5, 6, 7, 8, 2, 1, 4]]), "key": jax.random.key(0)}

    def objective(params):
        return method.objective(student.replace(params=params), batch, TARGET)[0]

    def chance(params):
        metrics = method.evaluation(student.replace(params=params), batch, TARGET)
        return metrics["acceptance_length_sampled"].value

    descend = jax.jit(
        lambda params: jax.tree.map(lambda x, g: x - 0.5 * g, params, jax.grad(objective)(params))
    )
    params = student.params
    for _ in range(20):
        params = descend(params)
    assert chance(params) > chance(student.params) + 0.1


def test_anchors_are_drawn_among_the_places_that_count() -> None:
    valid = jnp.asarray(
        [
            [False, True, True, False, True, True, True],
            [False, False, True, False, False, False, False],
        ]
    )
    keys = jax.random.split(jax.random.key(0), (40, 2))
    draws = [np.asarray(draw_places(keys[i], valid, 3)) for i in range(40)]
    for places in draws:
        assert all(len(set(row)) == 3 for row in places.tolist())
        assert valid[0][places[0]].all()
        assert 2 in places[1]
    assert {int(place) for places in draws for place in places[0]} == {1, 2, 4, 5, 6}


@pytest.mark.full
@pytest.mark.thorough_except("dspark-method0-markov_in")
@pytest.mark.parametrize(
    ("kind", "method", "name"),
    [
        ("dspark", DSparkTraining(target="here"), "markov_in"),
        ("dflash2", DFlash2Training(target="here"), "predecessors"),
    ],
)
def test_what_a_draft_would_be_worth_is_simulated_with_the_text_s_tokens_before_each(
    kind, method, name
) -> None:
    """Check that a Markov head and a selector know the token before: without it logits differ."""
    student = strong(STUDENTS[kind](TARGET))
    batch = {**batch_of([[1, 2, 3, 4, 9, 3, 1, 5, 6, 7, 8, 2, 1, 4]]), "key": jax.random.key(0)}
    metrics = method.evaluation(student, batch, TARGET)
    assert 1 <= metrics["acceptance_length"].value <= 1 + DEPTH
    assert f"accuracy_{DEPTH - 1}" in metrics
    assert f"accuracy_{DEPTH}" not in metrics
    blind = student.replace(params=student.params | {name: jnp.zeros_like(student.params[name])})
    without = method.evaluation(blind, batch, TARGET)
    sampled = [measured["acceptance_length_sampled"].value for measured in (without, metrics)]
    assert sampled[0] != sampled[1]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (DFlashTraining(target="here", layers=0), r"method\.layers=0"),
        (DFlashTraining(target="here", block_size=1), r"method\.block_size=1: must be at least 2"),
        (DFlashTraining(target="here", gamma=-1.0), r"method\.gamma=-1\.0"),
        (DFlashTraining(target="here", dpace=2.0), r"method\.dpace=2\.0"),
        (
            DFlashTraining(target="here", loss="acceptance"),
            r"method\.labels='text': this is the cross entropy",
        ),
        (
            DFlashTraining(target="here", loss="kl"),
            r"method\.loss='kl': must be one of cross_entropy, acceptance, hybrid",
        ),
        (
            JetSpecTraining(target="here", loss="tv"),
            r"method\.loss='tv': must be one of kl, acceptance, hybrid",
        ),
        (
            DSparkTraining(target="here", loss="kl"),
            r"method\.loss='kl': must be one of distance, acceptance, hybrid",
        ),
        (JetSpecTraining(target="here", eta=-1.0), r"method\.eta=-1\.0"),
        (JetSpecTraining(target="here", anchors=0), r"method\.anchors=0"),
        (JetSpecTraining(target="here", mask_token_id=-2), r"method\.mask_token_id=-2"),
        (DSparkTraining(target="here", markov_rank=-1), r"method\.markov_rank=-1"),
        (DSparkTraining(target="here", token_weight=-1.0), r"token_weight"),
        (
            DFlash2Training(target="here", conv_kernel_size=9),
            r"method\.conv_kernel_size=9: must be at least 1, and at most",
        ),
        (DFlash2Training(target="here", selector_top_k=0), r"method\.selector_top_k=0"),
        (DFlash2Training(target="here", selector_weight=-1.0), r"method\.selector_weight=-1\.0"),
        (DFlash2Training(target="here", dpace=2.0), r"method\.dpace=2\.0"),
        (
            DFlashTraining(target="here", output_multiplier=0.0),
            r"method\.output_multiplier=0\.0: must be a finite number",
        ),
        (
            DFlashTraining(target="here", final_logit_softcapping=-1.0),
            r"method\.final_logit_softcapping=-1\.0",
        ),
        (
            DFlash2Training(target="here", input_embedding_scale=-1.0),
            r"method\.input_embedding_scale=-1\.0",
        ),
    ],
)
def test_options_out_of_range_are_refused(method, message) -> None:
    with pytest.raises(ConfigError, match=message):
        method.check(window=64)


def test_embedding_and_head_of_dspark_stay_unless_asked() -> None:
    method = DSparkTraining(target="here")
    assert method.frozen("params.embed") and method.frozen("params.lm_head")
    assert not method.frozen("params.markov_in")
    assert not dataclasses.replace(method, freeze_head=False).frozen("params.embed")


@pytest.mark.parametrize(
    "method",
    [DFlashTraining(target="here", layers=1, **FACTORS), DFlash2Training(target="here", **FACTORS)],
)
def test_a_student_and_its_config_json_have_the_factors_of_the_method(method, tmp_path) -> None:
    """Check that a run can begin with a published drafter that has factors.

    The drafter that it writes has them too, and so drafts as it learnt.
    """
    selector = {"conv_group_size": 8, "selector_top_k": 4} if "2" in method.name else {}
    method = dataclasses.replace(method, block_size=SIZE, **selector)
    inputs = StudentInputs(None, np.ones(11), TARGET)
    student = method.init(jax.random.key(0), inputs)
    assert student.config.changed_factors == FACTORS
    student.save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path, dtype=np.float32)
    assert again.config == student.config
    plain = dataclasses.replace(
        method, input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=0.0
    )
    assert plain.init(jax.random.key(0), inputs).config.changed_factors == {}
