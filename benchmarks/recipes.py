"""Memory and hours of the training recipes in `configs`, by compilers and by arithmetic.

python -m benchmarks.recipes

Each cell of the table is a recipe on chips: memory by their compiler, which needs no such chip, and
hours by arithmetic. A cell takes minutes. Its record is saved at once, and the same command goes on
with the cells that are missing. A target is cut to its first layers, as many as the drafter reads
or more, because the temporary memory of a step does not grow with the others: they have no
gradient. The weights of the layers that are left out are added by arithmetic. `--layers 0` compiles
the whole target.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from specjax.chips import Chip, find_chip
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.files import write_text
from specjax.models import config_json
from specjax.models.config import ModelConfig
from specjax.models.published import parameter_count, published
from specjax.models.transformer import Target
from specjax.planning.work import attention_work, product_work
from specjax.training.config import TrainConfig
from specjax.training.dry_run import abstract_run
from specjax.training.methods import DSparkTraining, Eagle3Training
from specjax.training.objectives.blocks import BlockMethod
from specjax.training.step import name_of

METHODS = ("eagle3", "dflash", "dspark")
TARGETS = {
    "qwen3_8b": "qwen3-8b",
    "qwen3_32b": "qwen3-32b",
    "llama3_8b": "llama-3.1-8b",
    "gpt_oss_20b": "gpt-oss-20b",
    "gemma4_e4b": "gemma-4-e4b",
}
"""The published model of each name in `configs`."""

CYCLE_LAYERS = (6, 12)
"""The two numbers of layers of which the cycles of a training step are counted.

Both are multiples of Gemma 4's pattern of layers, and no drafter reads more layers.
"""


@dataclass(frozen=True)
class Chips:
    """Chips of one kind, as a user rents them.

    Attributes:
        name: the name of the offer: a v5p-8 has 8 cores, which are 4 chips.
        topology: their arrangement, as for ``plan compile-training``.
        chip: the name in `specjax.chips`.
        mesh: the mesh for targets that fit on one chip.
        large_mesh: the mesh for targets that do not.
    """

    name: str
    topology: str
    chip: str
    mesh: tuple[int, int]
    large_mesh: tuple[int, int]

    @property
    def count(self) -> int:
        """The number of chips."""
        return self.mesh[0] * self.mesh[1]


OFFERS = (
    Chips("v5p-8", "v5p:2x2x1", "tpu-v5p", (4, 1), (1, 4)),
    Chips("H100 x 8", "h100", "h100", (8, 1), (2, 4)),
    Chips("v5p-32", "v5p:2x2x4", "tpu-v5p", (8, 2), (4, 4)),
    Chips("v5e-8", "v5e:2x4", "tpu-v5e", (2, 4), (1, 8)),
    Chips("H100 x 1", "h100", "h100", (1, 1), (1, 1)),
)


@dataclass(frozen=True)
class RecipesConfig:
    """Compile the cells of the table that are missing, and print the table.

    Attributes:
        output: the file with the records.
        layers: the number of the target's layers that are compiled; 0 for all.
        minutes: no cell is begun after so many minutes.
        limit: a cell is given up after so many minutes.
        effort: how hard the compiler of TPUs works for the program's speed, from -1 to 1. With -1 a
            cell takes minutes, and with 0, its default, more than ten.
        only: only cells whose name contains one of these texts, such as "dflash_qwen3_8b on v5e-8".
        share: the share of the chips' peak arithmetic that the hours assume.
        cycles: count the cycles of a training step of cells that have a record: they are compiled
            with the compiler's default effort and two numbers of layers, which takes minutes each.
        table: print the table of the records, and compile nothing.
    """

    output: str = "benchmarks/results/recipes.json"
    layers: int = 6
    minutes: float = 60.0
    limit: float = 20.0
    effort: float = -1.0
    only: tuple[str, ...] = ()
    share: float = 0.4
    cycles: bool = False
    table: bool = False


def cells() -> list[tuple[str, str, Chips]]:
    """Return the name of each recipe, its published target and the chips."""
    return [
        (f"{method}_{key}", target, chips)
        for key, target in TARGETS.items()
        for chips in OFFERS
        for method in METHODS
    ]


# --- memory, by the compiler ----------------------------------------------------------------------


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """Return a target with only its first layers; 0 for all of them."""
    if not layers or layers >= config.num_layers:
        return config
    return replace(
        config,
        num_layers=layers,
        windowed_layers=tuple(layer for layer in config.windowed_layers if layer < layers),
        layers=config.layers[:layers],
    )


def mesh_of(target: str, chips: Chips) -> tuple[int, int]:
    """Return the mesh: split weights where they fill more than a third of a chip."""
    whole = 2 * parameter_count(published(target))
    return chips.large_mesh if whole > find_chip(chips.chip).memory / 3 else chips.mesh


def abstract_student(config: TrainConfig, target: ModelConfig) -> Any:
    """Return the drafter that is trained for a target, with shapes in place of arrays."""
    abstract = jax.eval_shape(lambda: Target.init(target, jax.random.key(0), jnp.bfloat16))
    return abstract_run(config, None, abstract).state.student


def student_size(config: TrainConfig, target: ModelConfig) -> int:
    """Return the number of parameters of the drafter that is trained for a target."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_student(config, target)))


def compile_cell(recipe: str, target: str, chips: Chips, config: RecipesConfig) -> Any:
    """Return the record of a cell: what the compiler says, in a process of its own.

    Raises:
        InputError: The target is cut to fewer layers than the drafter reads.
    """
    whole = published(target)
    part = cut(whole, config.layers)
    training = load_yaml(TrainConfig, f"configs/{recipe}.yaml")
    if student_size(training, part) != student_size(training, whole):
        raise InputError(
            f"layers={config.layers}: the drafter of {recipe} reads more layers of its target, and"
            " is smaller for fewer: give at least as many as it reads"
        )
    variables = {"JAX_PLATFORMS": "cpu"}
    if chips.chip.startswith("tpu"):
        variables["JAX_EXEC_TIME_OPTIMIZATION_EFFORT"] = str(config.effort)
    mesh = mesh_of(target, chips)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(config_json.format_config(part, "bfloat16"))
        )
        command = [
            *(sys.executable, "-m", "specjax", "plan", "compile-training", "--json"),
            *("--chips", chips.topology, "--mesh", str(mesh[0]), str(mesh[1])),
            *("--target", folder, "--train", f"configs/{recipe}.yaml"),
        ]
        try:
            ended = subprocess.run(
                command,
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                check=False,
                timeout=60 * config.limit,
            )
        except subprocess.TimeoutExpired:
            return {"refused": f"not compiled within {config.limit:.0f} minutes"}
    if ended.returncode:
        return {"refused": ended.stderr.strip().splitlines()[-1][-300:]}
    report = json.loads(ended.stdout)
    programs = {
        name: value
        for name, value in report.items()
        if isinstance(value, dict) and "a_step" in value
    }
    # Their weights lie on the chips of the mesh's second axis.
    absent = 2 * (parameter_count(whole) - parameter_count(part)) // mesh[1]
    return {
        "mesh": mesh,
        "layers": part.num_layers,
        "of_layers": whole.num_layers,
        "absent": absent,
        "programs": {
            name: {
                "memory": value["memory"],
                "seconds": round(value["seconds"]),
                "cycles": value["a_step"]["cycles"],
            }
            for name, value in programs.items()
        },
    }


def bytes_on_a_chip(record: Mapping[str, Any]) -> int:
    """Return the memory of the largest program of a cell on one chip."""
    return record["absent"] + max(
        sum(program["memory"].values()) for program in record["programs"].values()
    )


# --- hours, by arithmetic -------------------------------------------------------------------------


@functools.cache
def operations(config: TrainConfig, target: ModelConfig) -> float:
    """Return the operations of a training for one token of a window, without recomputation.

    A weight that is trained costs 6 operations for each token that it multiplies: 2 forward, 2 for
    its own gradient and 2 for that of its input. A frozen head has no gradient of its own, and
    ``fc``, which reads the target, none of its input: 4.
    """
    method, window = config.method, config.data.window
    student = abstract_student(config, target)
    sizes = {
        name_of(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(student)
    }
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    head = target.hidden_size * target.vocab_size
    read = product_work(target, 1).flops + attention_work(target, 1, 1, window // 2).flops
    layer = student.config.layer if hasattr(student.config, "layer") else target
    width = 4 * layer.num_heads * layer.head_dim
    fc = 4 * sizes["params.fc"]
    if isinstance(method, Eagle3Training):
        step = 6 * (layers + sizes["params.lm_head"]) + 3 * width * window / 2
        return read + fc + method.steps * step
    assert isinstance(method, BlockMethod)
    # A window has so many blocks, whose tokens are computed beside the window's own keys.
    share = min(method.anchors, window) * method.block_size / window
    keys = sum(
        size for name, size in sizes.items() if name.endswith((".k", ".v")) and ".layers." in name
    )
    block = 6 * layers + 4 * head + 3 * method.layers * width * (window / 2 + method.block_size)
    if isinstance(method, DSparkTraining):
        # The target's own distribution at the tokens of the blocks, and the Markov head.
        block += 2 * head + 6 * method.markov_rank * target.vocab_size
    return read - 2 * head + fc + 6 * keys + share * block


def hours(config: TrainConfig, target: ModelConfig, chip: Chip, count: int, share: float) -> float:
    """Return the hours of a whole training on so many chips at a share of their peak."""
    tokens = config.steps * config.data.batch * config.data.window
    return tokens * operations(config, target) / (count * chip.flops * share) / 3600


def count_cycles(recipe: str, target: str, chips: Chips, config: RecipesConfig) -> dict[str, Any]:
    """Return the cycles of a training step by the number of layers, or why they are refused."""
    counts = {}
    for layers in CYCLE_LAYERS:
        record = compile_cell(recipe, target, chips, replace(config, layers=layers, effort=0.0))
        if "refused" in record:
            return {"cycles_refused": record["refused"]}
        counts[str(layers)] = record["programs"]["step"]["cycles"]
    return {"step_cycles": counts}


def hours_by_cycles(record: Mapping[str, Any], config: TrainConfig, chip: Chip) -> float | None:
    """Return the hours by the compiler's cycles; None if they were not counted.

    Every further layer is taken to cost what a layer between the two depths costs.
    """
    if not chip.clock or "step_cycles" not in record:
        return None
    few, many = sorted(record["step_cycles"], key=int)
    count = record["step_cycles"][few]
    a_layer = (record["step_cycles"][many] - count) / (int(many) - int(few))
    cycles = count + a_layer * (record["of_layers"] - int(few))
    return config.steps * cycles / chip.clock / 3600


def table(records: Mapping[str, Any], share: float) -> str:
    """Return the table in Markdown."""
    lines = [
        "| recipe | chips | mesh | GB on a chip | of GB | | hours | hours by cycles |",
        "|---|---|---|---:|---:|---|---:|---:|",
    ]
    for recipe, target, chips in cells():
        config = load_yaml(TrainConfig, f"configs/{recipe}.yaml")
        chip = find_chip(chips.chip)
        record = records.get(f"{recipe} on {chips.name}")
        time_needed = f"{hours(config, published(target), chip, chips.count, share):,.0f}"
        cycles: float | None = None
        if record is None:
            size, verdict = "", "not compiled"
        elif "refused" in record:
            size, verdict = "", "the compiler failed"  # the record says why
        else:
            needed = bytes_on_a_chip(record)
            size = f"{needed / 1e9:.1f}"
            verdict = "fits" if needed <= chip.memory else "does not fit"
            cycles = hours_by_cycles(record, config, chip)
        mesh = " x ".join(map(str, mesh_of(target, chips)))
        by_cycles = "" if cycles is None else f"{cycles:,.0f}"
        lines.append(
            f"| `{recipe}` | {chips.name} | {mesh} | {size} | {chip.memory / 1e9:.0f} | {verdict} |"
            f" {time_needed} | {by_cycles} |"
        )
    return "\n".join(lines)


def is_missing(record: Mapping[str, Any] | None, chips: Chips, config: RecipesConfig) -> bool:
    """Return whether a cell has not been compiled, or its cycles have not been counted."""
    if not config.cycles:
        return record is None
    if record is None or "refused" in record or not find_chip(chips.chip).clock:
        return False
    return not {"step_cycles", "cycles_refused"} & record.keys()


def main(config: RecipesConfig) -> None:
    """Compile what is missing, and print the table."""
    output = Path(config.output)
    records = json.loads(output.read_text()) if output.exists() else {}
    started = time.monotonic()
    all_cells = [] if config.table else cells()
    for number, (recipe, target, chips) in enumerate(all_cells, 1):
        name = f"{recipe} on {chips.name}"
        if config.only and not any(text in name for text in config.only):
            continue
        if not is_missing(records.get(name), chips, config):
            continue
        if time.monotonic() - started > 60 * config.minutes:
            break
        print(f"{number} of {len(all_cells)}: {name}", file=sys.stderr, flush=True)
        if not config.cycles:
            records[name] = compile_cell(recipe, target, chips, config)
        else:
            records[name] |= count_cycles(recipe, target, chips, config)
        write_text(output, json.dumps(records, indent=1) + "\n")
    print(table(records, config.share))


if __name__ == "__main__":
    main(tyro.cli(RecipesConfig))
