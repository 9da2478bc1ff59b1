"""Drafters that are trained for targets with layers that keep a state.

The tests check the loss of a step, and the drafter after training.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.config import ConfigError, load_yaml
from specjax.drafters import MTP
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import LinearAttention, Rope
from specjax.models.transformer import Target
from specjax.training import loop
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.contract import StudentInputs, TrainingMethod
from specjax.training.methods import DFlashTraining, Distill, MTPTraining, PEagleTraining
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.objectives.windows import score
from specjax.training.optimizer import make_optimizer
from specjax.training.step import initial_state, train_step
from tests.conftest import ASSETS, outputs
from tests.drafters.test_mtp_of_hybrids import join_experts
from tests.evaluation.test_conformance_of_hybrids import lively_hybrid
from tests.models.families import zoo
from tests.training import test_blocks as of_blocks
from tests.training import test_on_families as on_families
from tests.training.test_loop import assert_same_runs, stopping_at, write_texts
from tests.training.test_methods import batch_of


@pytest.fixture(scope="module")
def hybrid() -> Target:
    return lively_hybrid(vocab_size=zoo.VOCABULARY)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=20)


def thoroughly(cases, often):
    """Return all ``cases``, marked as thorough unless they run ``often``."""
    return [
        pytest.param(case, marks=[pytest.mark.thorough] * (case not in often)) for case in cases
    ]


# --- documents of a window ------------------------------------------------------------------------


def check_documents(target: Target) -> None:
    """Check that what a drafter reads of a document is as of the document alone.

    Documents are longer than the chunks in which states are carried on. Some end inside chunks, and
    one ends with a chunk.
    """
    lengths = [30, 34, 3, 83]
    text = np.random.default_rng(5).integers(0, zoo.VOCABULARY, sum(lengths) + 1)
    documents = [part.tolist() for part in np.split(text, np.cumsum(lengths)[:-1])]
    taps = tuple(range(target.config.num_layers))

    @jax.jit
    def read(batch):
        output, _ = score(target, batch, taps)
        return jnp.concatenate([output.taps, output.hidden[:, :, None]], axis=2)[0]

    packed, as_one = read(batch_of(documents)), read(batch_of([text.tolist()]))
    begin = 0
    for document, length in zip(documents, lengths, strict=True):
        alone = np.asarray(read(batch_of([[*document, 0]])))[:length]
        here = slice(begin, begin + length)
        np.testing.assert_allclose(packed[here], alone, atol=1e-4 * np.abs(alone).max())
        # The input of layer 1 depends on the text before only through layer 0, and after a short
        # convolution the first tokens' alone does.
        if begin:
            first, alone_first = as_one[begin : begin + 2, 1], alone[:2, 1]
            assert np.abs(first - alone_first).max() > 0.1 * np.abs(alone_first).max()
        begin += length


@pytest.mark.full
def test_what_a_drafter_reads_of_a_document_is_as_of_the_document_alone(hybrid) -> None:
    check_documents(hybrid)


# --- the loss of a step ---------------------------------------------------------------------------

METHODS: dict[str, TrainingMethod] = {
    **on_families.METHODS,
    "distill, a hybrid": Distill(
        target="here",
        model=replace(
            on_families.SIZES,
            num_layers=2,
            model_type="qwen3_5_text",
            linear=LinearAttention(key_heads=1, value_heads=2, key_dim=4, value_dim=6),
            linear_layers=(0,),
        ),
    ),
}
REFUSED = ("moa", "moa with tli")
"""Methods with summaries of keys and values, or with layers that would continue from states."""

LEARNS = [method for method in METHODS if method not in REFUSED]


@pytest.mark.full
@pytest.mark.parametrize("method", thoroughly(LEARNS, often=("eagle3", "mtp")))
def test_a_method_learns_what_its_drafter_does(hybrid, method) -> None:
    student = on_families.learn(METHODS[method], hybrid)
    if method == "mtp":
        assert student.config.layout == "qwen" and student.sizes.gated_attention


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_a_method_learns_so_beside_experts(tmp_path, name, method) -> None:
    """Check targets made by transformers; a module for such a target has experts too."""
    zoo.save(name, tmp_path)
    student = on_families.learn(METHODS[method], Target.from_pretrained(tmp_path, dtype=np.float32))
    if method == "mtp":
        assert student.config.layout == "qwen" and student.sizes.moe is not None


@pytest.mark.full
@pytest.mark.parametrize("name", thoroughly(of_blocks.METHODS, often=("dflash",)))
def test_a_loss_of_blocks_is_its_formula_over_blocks_drafted_one_by_one(hybrid, name) -> None:
    method, kind = of_blocks.METHODS[name]
    student = of_blocks.strong(of_blocks.STUDENTS[kind](hybrid))
    loss, _ = jax.jit(method.objective)(student, of_blocks.BATCH, hybrid)
    np.testing.assert_allclose(loss, of_blocks.slow_loss(method, student, hybrid)[0], rtol=2e-4)


@pytest.mark.parametrize("method", REFUSED)
def test_what_cannot_be_learnt_from_states_is_refused_in_a_line(hybrid, method) -> None:
    on_families.check_refused(METHODS[method], hybrid)


# --- the drafter after training -------------------------------------------------------------------

LENGTH, NEW, STEPS = 4, 28, 200
REAL = {
    "eagle3": METHODS["eagle3"],
    "mtp": METHODS["mtp"],
    "dflash": DFlashTraining(target="here", block_size=4, layers=2),
    "peagle": PEagleTraining(target="here", depths=3, layers=2),
}


def own_texts(target: Target):
    """Return the target's own texts, which continue a few random tokens each."""
    prompts = np.random.default_rng(4).integers(0, zoo.VOCABULARY, (6, LENGTH))
    return write(target, None, prompts)


@pytest.fixture(scope="module")
def generated(hybrid):
    return own_texts(hybrid)


def write(target, drafter, prompts):
    return specjax.generate(target, drafter, prompts, max_new_tokens=NEW, eos_token_ids=())


def check_trained(method: TrainingMethod, target: Target, generated, directory: Path) -> None:
    """Train a drafter on the target's ``generated`` texts, and check that it halves the steps.

    It is read back from ``directory``.
    """
    texts = np.asarray(generated.tokens)
    batch = {
        "tokens": jnp.asarray(texts),
        "segments": jnp.zeros(texts.shape, jnp.int32),
        "loss_mask": jnp.ones((len(texts), texts.shape[1] - 1), bool),
        "key": jax.random.key(0),
        "progress": jnp.ones(()),
    }
    inputs = StudentInputs(None, np.bincount(texts.ravel(), minlength=zoo.VOCABULARY), target)
    student = method.init(jax.random.key(1), inputs)
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.0), STEPS
    )
    state, losses = initial_state(method, student, optimizer), []
    for _ in range(STEPS):
        state, metrics = train_step(state, batch, target, method=method, optimizer=optimizer)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2
    state.student.save_pretrained(directory)
    drafter = load_drafter(f"{method.name}:{directory}", Chain(3), target.config)
    jax.tree.map(np.testing.assert_array_equal, drafter.params, state.student.params)
    drafted = write(target, drafter, texts[:, :LENGTH])
    assert outputs(drafted) == outputs(generated)
    assert drafted.stats.steps.sum() < generated.stats.steps.sum() / 2


@pytest.mark.full
@pytest.mark.parametrize("name", thoroughly(REAL, often=("mtp",)))
def test_what_was_trained_is_read_back_and_halves_the_steps(
    hybrid, generated, name, tmp_path
) -> None:
    """Check drafters that were trained on the target's own texts."""
    check_trained(REAL[name], hybrid, generated, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("joined", [False, True])
def test_training_goes_on_from_the_module_in_the_targets_own_checkpoint(
    tmp_path, source, joined
) -> None:
    """Check that the module keeps its names, and its experts in as many tensors.

    The target has more end tokens than its config.json says.
    """
    zoo.save("qwen3_5_moe", tmp_path / "sizes")
    config = replace(
        config_json.read_config(CheckpointFiles(tmp_path / "sizes")),
        vocab_size=3072,
        eos_token_ids=(2, 3),
    )
    target, directory = Target.init(config, jax.random.key(0)), tmp_path / "target"
    target.save_pretrained(directory)
    MTP.init(target, jax.random.key(1)).save_pretrained(directory / "module")
    module = load_file(directory / "module" / "model.safetensors")
    module = join_experts(module) if joined else module
    save_file(load_file(directory / "model.safetensors") | module, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"eos_token_id": 2}))
    rate = 1e-6
    run = TrainConfig(
        output=str(tmp_path / "run"),
        method=MTPTraining(target=str(directory)),
        init_from=str(directory),
        steps=1,
        export_dtype="float32",
        data=DataConfig(
            source=source, tokenizer=str(ASSETS / "target"), window=16, batch=2, holdout=0.2
        ),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1),
    )
    best = loop.train(run)
    trained = load_file(best / "model.safetensors")
    assert (
        set(trained) == set(module)
        and ("mtp.layers.0.mlp.experts.gate_up_proj" in module) == joined
    )
    # Adam's first step is no larger than its rate, and decay adds a part of it.
    for name, value in trained.items():
        np.testing.assert_allclose(value, module[name], atol=2 * rate, err_msg=name)


# --- a hybrid and its module together -------------------------------------------------------------


def tiny_run(output, source) -> TrainConfig:
    """Return the run of `configs/lm_mtp_hybrid.yaml`, made small."""
    run = load_yaml(TrainConfig, ASSETS.parents[1] / "configs" / "lm_mtp_hybrid.yaml")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "head_dim": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    sizes |= {"num_layers": 3, "linear_layers": (0, 1), "max_positions": 64}
    sizes["linear"] = LinearAttention(key_heads=1, value_heads=2, key_dim=4, value_dim=6)
    return replace(
        run,
        output=str(output),
        method=replace(run.method, model=replace(run.method.model, **sizes)),
        steps=8,
        checkpoint_every=4,
        evaluate_every=8,
        export_dtype="float32",
        data=replace(run.data, source=source, vocab_size=290, window=32, batch=4, holdout=0.2),
        optimizer=replace(run.optimizer, warmup_steps=2),
    )


@pytest.mark.thorough
def test_a_hybrid_and_its_module_go_on_as_if_never_stopped(tmp_path, source, monkeypatch) -> None:
    loop.train(tiny_run(tmp_path / "whole", source))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "train_step", stopping_at(6))
        loop.train(tiny_run(tmp_path / "stopped", source))
    best = loop.train(tiny_run(tmp_path / "stopped", source))
    assert_same_runs(tmp_path / "whole", tmp_path / "stopped")
    modules = [
        load_file(tmp_path / run / "best" / "mtp" / "model.safetensors")
        for run in ("whole", "stopped")
    ]
    jax.tree.map(np.testing.assert_array_equal, *modules)
    assert "mtp.pre_fc_norm_hidden.weight" in modules[0]

    target = Target.from_pretrained(best)
    drafter = load_drafter(f"mtp:{best / 'mtp'}", Chain(2), target.config)
    assert isinstance(drafter, MTP) and target.config.linear_layers == (0, 1)
    prompts = np.arange(6).reshape(2, 3)
    assert outputs(write(target, drafter, prompts)) == outputs(write(target, None, prompts))


def test_a_model_that_could_not_be_written_is_refused_before_it_is_trained() -> None:
    sizes = ModelSizes(rope=Rope(turned=0.25))
    with pytest.raises(
        ConfigError, match=r"method\.model: .*partial_rotary_factor=0.25: must be 1"
    ):
        sizes.check(window=8)
    # A Llama model does not read the sizes of linear attention.
    replace(sizes, rope=Rope(), linear=LinearAttention(1, 1, 4, 4)).check(window=8)
