"""Time of the training objectives of EAGLE-3 and DFlash, compared with SpecForge's (PyTorch).

    git clone https://github.com/sgl-project/SpecForge
    python -m benchmarks.objectives --specforge SpecForge

Both read the same tensors: tokens, the target's hidden states, its head, and the drafter's weights.
No target runs, and no optimizer. One call is the objective with its gradient by all weights of the
drafter. Before any time is taken, the losses and all gradients must agree.

SpecForge's modules are used as they are, with three exceptions. Its loss of EAGLE-3 is a kernel for
GPUs, so the function that SpecForge keeps as its reference, which PyTorch compiles, takes its
place. The places of the blocks of DFlash are those that specjax draws. And its figures beside the
loss (accuracy, acceptance rate), which ours does not compute, are left out of the time, unless
``--their-metrics`` is given.
"""

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from specjax.drafters import DFlash, Eagle3
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.transformer import States, Target
from specjax.training.contract import Batch, row_keys
from specjax.training.methods import DFlashTraining, Eagle3Training
from specjax.training.objectives import blocks, draft_vocabulary
from specjax.training.objectives.ahead import counted

Result = tuple[float, dict[str, np.ndarray]]
"""The loss, and the gradient of each tensor by its published name."""
Call = Callable[[], Any]
"""Computes the loss and its gradient, and waits for them."""


@dataclass(frozen=True)
class ObjectivesConfig:
    """Time both objectives, ours and SpecForge's.

    Attributes:
        specforge: the directory of a checkout of SpecForge.
        methods: the methods to compare.
        hidden_size: hidden size of the target and the drafter.
        intermediate_size: size of the drafter's MLPs.
        heads: heads of the drafter; it has a quarter as many key/value heads.
        vocab_size: vocabulary of the target, and of the DFlash drafter.
        draft_vocab_size: vocabulary of the EAGLE-3 drafter.
        windows: the number of windows.
        window: tokens of a window.
        steps: steps of EAGLE-3's training-time test.
        layers: layers of the DFlash drafter.
        block_size: tokens of a DFlash block, with the anchor.
        anchors: blocks of each window.
        threads: threads of each side; the process is bound to as many cores.
        repeats: repeats of each side; the sides take turns.
        their_metrics: compute SpecForge's figures beside the loss.
        output: write all times to this JSON file.
    """

    specforge: str
    methods: tuple[Literal["eagle3", "dflash"], ...] = ("eagle3", "dflash")
    hidden_size: int = 512
    intermediate_size: int = 1536
    heads: int = 8
    vocab_size: int = 32_000
    draft_vocab_size: int = 8000
    windows: int = 1
    window: int = 512
    steps: int = 7
    layers: int = 2
    block_size: int = 16
    anchors: int = 64
    threads: int = 2
    repeats: int = 9
    their_metrics: bool = False
    output: str = ""


@dataclass(frozen=True)
class Tensors:
    """The tensors that both sides read.

    Attributes:
        tokens: ``[B, T + 1]``.
        taps: ``[B, T, taps, H]`` hidden states of some of the target's layers.
        hidden: ``[B, T, H]`` final hidden states, after the last norm.
    """

    tokens: np.ndarray
    taps: np.ndarray
    hidden: np.ndarray

    @classmethod
    def random(cls, config: ObjectivesConfig, taps: int) -> "Tensors":
        """Draw normal states and uniform tokens."""
        rng = np.random.default_rng(0)
        shape = (config.windows, config.window)
        tokens = rng.integers(0, config.vocab_size, (shape[0], shape[1] + 1))
        states = rng.normal(size=(*shape, taps + 1, config.hidden_size)).astype(np.float32)
        return cls(tokens, states[:, :, :taps], states[:, :, taps])

    def batch(self) -> Batch:
        """Return the batch; all labels count."""
        return {
            "tokens": jnp.asarray(self.tokens, jnp.int32),
            "segments": jnp.zeros(self.tokens.shape, jnp.int32),
            "loss_mask": jnp.ones(self.hidden.shape[:2], bool),
            "key": jax.random.key(0),
            "progress": jnp.zeros(()),
        }


def target_of(config: ObjectivesConfig) -> Target:
    """Return the target. Only its embedding and its head are used."""
    sizes = ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=8,
        num_heads=config.heads,
        num_kv_heads=max(1, config.heads // 4),
        head_dim=config.hidden_size // config.heads,
        tie_embeddings=False,
    )
    return Target.init(sizes, jax.random.key(0))


def tensors_of(drafter: Any) -> dict[str, np.ndarray]:
    """Return a drafter's tensors by their published names."""
    with tempfile.TemporaryDirectory() as place:
        drafter.save_pretrained(place)
        return load_file(Path(place) / "model.safetensors")


def ours(
    module: Any, method: Any, target: Target, drafter: Any, tensors: Tensors
) -> tuple[Call, Callable[[Any], Result]]:
    """Return a call of our objective, and a function that reads its result.

    ``module`` is the one in which the method reads the target: it gets prepared states instead.
    """
    params = drafter.params
    trained = {name: part for name, part in params.items() if name != "d2t"}

    def loss(
        trained: Any, batch: Batch, target: Target, hidden: jax.Array, taps: jax.Array
    ) -> jax.Array:
        student = drafter.replace(params=params | trained)
        states = States(hidden=hidden, taps=taps)
        with mock.patch.object(module, "read", lambda *arguments: (states, ())):
            return method.objective(student, batch, target)[0]

    arguments = (
        trained,
        tensors.batch(),
        target,
        jnp.asarray(tensors.hidden),
        jnp.asarray(tensors.taps),
    )
    program = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()

    def read(outcome: Any) -> Result:
        value, gradients = outcome
        return float(value), tensors_of(drafter.replace(params=params | gradients))

    return lambda: jax.block_until_ready(program(*arguments)), read


# --- SpecForge ------------------------------------------------------------------------------------


@contextmanager
def without_triton() -> Iterator[None]:
    """Let modules define kernels for GPUs while they are imported where Triton is not installed."""
    # These look for Triton, too, and must not see ours.
    for name in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)

    language = types.ModuleType("triton.language")
    language.constexpr = object  # pyright: ignore[reportAttributeAccessIssue]
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function  # pyright: ignore[reportAttributeAccessIssue]
    triton.language = language  # pyright: ignore[reportAttributeAccessIssue]
    names = {"triton": triton, "triton.language": language}
    if any(name in sys.modules for name in names):  # it is installed
        yield
        return
    # Not `mock.patch.dict`, which would forget the modules that are imported meanwhile.
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def import_specforge(directory: str) -> tuple[Any, Any, Any, Any]:
    """Return SpecForge's modules of both objectives and of both drafters."""
    if not (Path(directory) / "specforge" / "core" / "loss.py").is_file():
        raise InputError(
            f"specforge={directory!r}: it has no specforge/core/loss.py; give a checkout of"
            " https://github.com/sgl-project/SpecForge"
        )
    sys.path.insert(0, directory)
    with without_triton():
        from specforge.algorithms.common import (  # pyright: ignore[reportMissingImports]
            dflash_family_model,
        )
        from specforge.algorithms.eagle3 import (  # pyright: ignore[reportMissingImports]
            model as eagle3_model,
        )
        from specforge.core import loss  # pyright: ignore[reportMissingImports]
        from specforge.modeling import draft  # pyright: ignore[reportMissingImports]
    reference = loss._compute_loss
    eagle3_model.LogSoftmaxLoss = types.SimpleNamespace(apply=reference)
    return eagle3_model, dflash_family_model, draft, reference


def load_weights(model: Any, tensors: dict[str, np.ndarray]) -> None:
    """Copy weights into a module of PyTorch, which must have all of them."""
    import torch

    state = {name: torch.tensor(value) for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    buffers = {name for name, _ in model.named_buffers()} | {"embed_tokens.weight"}
    if unexpected or set(missing) - buffers:
        raise InputError(f"SpecForge's drafter has other tensors: {missing}, {unexpected}")


def read_torch(trained: dict[str, Any]) -> Callable[[Any], Result]:
    """Return a function that reads the loss and the gradients of ``trained``."""
    return lambda loss: (
        float(loss.detach()),
        {name: part.grad.numpy() for name, part in trained.items()},
    )


def gradient_call(loss_of: Callable[[], Any], trained: dict[str, Any]) -> Call:
    """Return a call of a loss in PyTorch and its gradient."""

    def call() -> Any:
        for part in trained.values():
            part.grad = None
        loss = loss_of()
        loss.backward()
        return loss

    return call


def their_eagle3(
    config: ObjectivesConfig, target: Target, drafter: Eagle3, tensors: Tensors, decay: float
) -> tuple[dict[str, Call], Callable[[Any], Result], float]:
    """Return SpecForge's EAGLE-3 in its forms, and a function that reads its result.

    Its two forms of labels are from all logits of the target, or from those of the draft
    vocabulary.
    """
    import torch
    from transformers import LlamaConfig

    module, _, draft, _ = import_specforge(config.specforge)
    layer = drafter.config.layer
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope.theta,
        "max_position_embeddings": 2 * config.window,
        "pad_token_id": 0,
        "hidden_act": "silu",
    }
    model = draft.LlamaForCausalLMEagle3(
        LlamaConfig(**sizes),
        attention_backend="sdpa",
    )
    load_weights(model, tensors_of(drafter))
    ids = np.arange(config.draft_vocab_size) + np.asarray(drafter.params["d2t"])
    model.t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    model.t2d[torch.tensor(ids)] = True
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.tensor(np.asarray(target.params["embed"])))
    model.embed_tokens.weight.requires_grad_(False)
    trained = {name: part for name, part in model.named_parameters() if part.requires_grad}
    objective = module.OnlineEagle3Model(model, length=config.steps, attention_backend="sdpa")
    if not config.their_metrics:
        _leave_out_metrics(objective, module)

    head = torch.tensor(np.asarray(target.head_weights).T.copy())

    def ahead(array: np.ndarray) -> Any:
        """Shift by one place, as SpecForge's loaders of data do."""
        padding = [(0, 0), (0, 1)] + [(0, 0)] * (array.ndim - 2)
        return torch.tensor(np.pad(array, padding)[:, 1:].copy())

    hidden = ahead(tensors.hidden)
    inputs = {
        "input_ids": torch.tensor(tensors.tokens[:, 1:].copy()),
        "attention_mask": torch.ones(tensors.hidden.shape[:2], dtype=torch.bool),
        "loss_mask": ahead(np.ones((*tensors.hidden.shape[:2], 1), np.int64)),
        "hidden_states": torch.tensor(tensors.taps.reshape(*tensors.taps.shape[:2], -1)),
    }

    def summed(losses: list[Any]) -> Any:
        return sum(decay**step * loss for step, loss in enumerate(losses))

    def from_all_logits() -> Any:
        with torch.no_grad():
            logits = torch.nn.functional.linear(hidden, head)
        return summed(objective(target=logits, **inputs)[0])

    def from_draft_vocabulary() -> Any:
        labels = {"target_hidden_for_compact": hidden, "target_head_weight": head}
        return summed(objective(target=None, **labels, **inputs)[0])

    forms = {"all logits": from_all_logits, "draft vocabulary": from_draft_vocabulary}
    calls = {f"SpecForge, {name}": gradient_call(form, trained) for name, form in forms.items()}
    return calls, read_torch(trained), 1.0


def _leave_out_metrics(objective: Any, module: Any) -> None:
    """Let SpecForge's EAGLE-3 compute its loss alone."""

    def loss_alone(
        *, logits: Any, target_p: Any, position_mask: Any, **rest: Any
    ) -> tuple[Any, ...]:
        loss = module.LogSoftmaxLoss.apply(logits, target_p, position_mask)
        return None, None, loss, None, None, None, None

    objective._acc_and_loss = loss_alone


def their_dflash(
    config: ObjectivesConfig, target: Target, drafter: DFlash, tensors: Tensors, gamma: float
) -> tuple[dict[str, Call], Callable[[Any], Result], float]:
    """Return SpecForge's DFlash, a function that reads its result, and a factor of its loss.

    It divides by the sum of the weights that count, and ours by the number of all predictions.
    """
    import torch
    from transformers import Qwen3Config

    _, module, draft, _ = import_specforge(config.specforge)
    layer = drafter.config.layer
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "num_hidden_layers": layer.num_layers,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope.theta,
        "max_position_embeddings": 2 * config.window,
        "attn_implementation": "sdpa",
        "tie_word_embeddings": False,
    }
    settings = Qwen3Config(**sizes)
    settings.num_target_layers = target.config.num_layers
    settings.block_size = config.block_size
    settings.dflash_config = {
        "target_layer_ids": [tap - 1 for tap in drafter.config.taps],
        "mask_token_id": drafter.config.mask_token_id,
    }
    model = draft.DFlashDraftModel(settings)
    load_weights(model, tensors_of(drafter))
    trained = dict(model.named_parameters())
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    for part, value in ((head, target.head_weights.T), (embedding, target.params["embed"])):
        part.weight.data.copy_(torch.tensor(np.array(value)))
        part.weight.requires_grad_(False)

    batch = tensors.batch()
    depth = config.block_size - 1
    valid = np.stack([np.asarray(counted(batch, step)) for step in range(depth)], axis=-1)
    valid = np.cumprod(valid, axis=-1).astype(bool)
    places = blocks.draw_places(row_keys(batch), jnp.asarray(valid[..., 0]), config.anchors)
    places = np.sort(np.asarray(places), axis=-1)
    anchors, is_block = torch.tensor(places + 1), torch.ones(places.shape, dtype=torch.bool)

    # The last token has no hidden state, and no block sees one.
    taps = np.pad(tensors.taps.reshape(*tensors.taps.shape[:2], -1), ((0, 0), (0, 1), (0, 0)))
    inputs = {
        "input_ids": torch.tensor(tensors.tokens),
        "hidden_states": torch.tensor(taps),
        "loss_mask": torch.ones(tensors.tokens.shape),
    }
    calls = {}
    # SpecForge recomputes the logits of chunks for the gradient; 0 turns that off.
    for name, chunk in {"chunks of 128 blocks": 128, "no chunks": 0}.items():
        objective = module.OnlineDFlashModel(
            model,
            head,
            embedding,
            mask_token_id=drafter.config.mask_token_id,
            block_size=config.block_size,
            attention_backend="sdpa",
            num_anchors=config.anchors,
            loss_decay_gamma=gamma,
            objective_chunk_blocks=chunk,
        )
        objective._sample_anchor_positions = lambda *arguments: (anchors, is_block)

        def loss(objective: Any = objective) -> Any:
            return objective(**inputs)[0]

        calls[f"SpecForge, {name}"] = gradient_call(loss, trained)
    weights = np.exp(-np.arange(depth) / gamma)
    counts = np.take_along_axis(valid, places[..., None], axis=1)
    factor = float((weights * counts).sum() / counts.size)
    return calls, read_torch(trained), factor


# --- the comparison -------------------------------------------------------------------------------


def check_equal(name: str, expected: Result, actual: Result, factor: float) -> dict[str, float]:
    """Return the largest relative differences of the losses and of the gradients.

    Raises:
        InputError: The losses differ by more than 1e-5, or a tensor's gradients by more than 1e-4
            of their norm.
    """
    loss, gradients = expected
    their_loss, their_gradients = actual
    of_loss = abs(factor * their_loss - loss) / abs(loss)
    names = [part for part in gradients if part not in ("d2t", "t2d")]
    if set(names) != set(their_gradients):
        raise InputError(f"{name}: the tensors differ: {set(names) ^ set(their_gradients)}")
    of_gradients = max(
        float(
            np.linalg.norm(factor * their_gradients[part] - gradients[part])
            / np.linalg.norm(gradients[part])
        )
        for part in names
    )
    if of_loss > 1e-5 or of_gradients > 1e-4:
        raise InputError(
            f"{name}: the losses differ by {of_loss:.1e}, the gradients by {of_gradients:.1e}"
        )
    return {"loss": of_loss, "gradients": of_gradients}


def cases_of(config: ObjectivesConfig, name: str) -> tuple[dict[str, Call], dict[str, Any]]:
    """Return the calls of a method by side, and how far their results differ."""
    target = target_of(config)
    if name == "eagle3":
        method: Any = Eagle3Training(
            target="here", draft_vocab_size=config.draft_vocab_size, steps=config.steps
        )
        ids = np.sort(np.random.default_rng(1).permutation(config.vocab_size))
        ids = np.sort(np.random.default_rng(1).choice(ids, config.draft_vocab_size, replace=False))
        drafter: Any = Eagle3.init(
            target, jax.random.key(1), ids=ids, intermediate_size=config.intermediate_size
        )
        module, theirs, option = draft_vocabulary, their_eagle3, method.decay
    else:
        method = DFlashTraining(
            target="here",
            layers=config.layers,
            block_size=config.block_size,
            anchors=config.anchors,
        )
        drafter = DFlash.init(
            target,
            jax.random.key(1),
            block_size=config.block_size,
            num_layers=config.layers,
            intermediate_size=config.intermediate_size,
        )
        module, theirs, option = blocks, their_dflash, method.gamma
    tensors = Tensors.random(config, len(drafter.taps(target.config)))
    call, read = ours(module, method, target, drafter, tensors)
    calls, read_theirs, factor = theirs(config, target, drafter, tensors, option)
    expected = read(call())
    differences = {
        side: check_equal(side, expected, read_theirs(their_call()), factor)
        for side, their_call in calls.items()
    }
    return {"specjax": call} | calls, differences


Times = dict[str, dict[str, list[float]]]
"""Seconds of each case, ``wall`` and ``cpu``: by the clock, and of all threads together."""


def times_of(cases: dict[str, Call], repeats: int) -> Times:
    """Return the times of each case; the cases take turns, and the first turn is left out."""
    times: Times = {name: {"wall": [], "cpu": []} for name in cases}
    for repeat in range(repeats + 1):
        for name, call in cases.items():
            started, started_cpu = time.perf_counter(), time.process_time()
            call()
            if repeat:
                times[name]["wall"].append(time.perf_counter() - started)
                times[name]["cpu"].append(time.process_time() - started_cpu)
    return times


def run(config: ObjectivesConfig) -> dict[str, Any]:
    """Return the seconds of each method by side, and how far the results differ."""
    import torch

    available = sorted(os.sched_getaffinity(0))
    if len(available) < config.threads:
        raise InputError(
            f"threads={config.threads}: this process may use {len(available)} cores; give at most"
            " as many"
        )
    os.sched_setaffinity(0, available[: config.threads])  # XLA takes a thread for each core
    torch.set_num_threads(config.threads)
    results: dict[str, Any] = {}
    for name in config.methods:
        cases, differences = cases_of(config, name)
        load = os.getloadavg()[0]
        times = times_of(cases, config.repeats)
        results[name] = {
            "times": times,
            "differences": differences,
            "load": [load, os.getloadavg()[0]],
        }
        report(config, name, results[name])
    return results


def report(config: ObjectivesConfig, name: str, result: dict[str, Any]) -> None:
    """Print the table of one method."""
    positions = config.windows * config.window
    before, after = result["load"]
    table = Table(
        "",
        "ms",
        "spread",
        "CPU ms",
        "positions/s",
        "throughput, ours / theirs",
        "loss, gradients differ by",
        title=f"{name}: {positions} positions, load {before:.1f} to {after:.1f}",
    )
    our_median = statistics.median(result["times"]["specjax"]["wall"])
    for side, times in result["times"].items():
        seconds = times["wall"]
        middle = statistics.median(seconds)
        difference = result["differences"].get(side)
        table.add_row(
            side,
            f"{1e3 * middle:.0f}",
            f"{1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f}",
            f"{1e3 * statistics.median(times['cpu']):.0f}",
            f"{positions / middle:,.0f}",
            f"{middle / our_median:.2f}" if difference else "",
            f"{difference['loss']:.0e}, {difference['gradients']:.0e}" if difference else "",
        )
    Console().print(table)


def main(config: ObjectivesConfig) -> None:
    """Print both tables."""
    results = run(config)
    if config.output:
        Path(config.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(ObjectivesConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
