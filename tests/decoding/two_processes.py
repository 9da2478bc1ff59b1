"""One of two processes that decode together.

    python -m tests.decoding.two_processes DIRECTORY COORDINATOR PROCESS

`test_processes` starts both, and decodes alone to compare. The directory holds the models; each
process writes its results there as PROCESS.json. If the directory has a file LOOK, a snapshot is
taken as well.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

import specjax
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, GrammarCompiler
from specjax.planning import costs
from specjax.planning.choice import compare_drafts
from specjax.reports.snapshot import take_snapshot
from specjax.sampling import Sampling
from specjax.sharding import make_mesh

# Rows end at different steps. The text of the last one repeats itself, so that prompt lookup can
# copy tokens.
PROMPTS = np.array([[1, 4, 2, 4, 2, 7], [3, 5, 9, 0, 0, 0], [8, 0, 0, 0, 0, 0], [6, 6, 6, 6, 6, 6]])
LENGTHS = np.array([6, 3, 1, 6])
NEW_TOKENS = 30
LOOK = "look"
SLOW, FREE = 1024.0, 2.0**-10
"""Seconds of a drafting pass; every other pass takes one second."""


def grammars() -> list[CompiledGrammar | None]:
    """Return a grammar for each row but the last, over tokens that are letters."""
    letters = [letter.encode() for letter in "abcdefghijk"]
    compiler = GrammarCompiler.of_tokens([*letters, b""], end_id=len(letters))
    patterns = ("([a-e]b[f-k])*", "(abcdefgh|[a-k]{3})*", "[f-k]*")
    return [*(compiler.compile(specjax.Regex(pattern)) for pattern in patterns), None]


def decode(
    directory: Path, mesh: Mesh | None, drafting: float, *, choose: bool, look: bool
) -> dict[str, Any]:
    """Return what the host reads when it decodes over ``mesh``, as JSON.

    Args:
        directory: the directory with the models.
        mesh: None is one process.
        drafting: seconds that the clock says drafting takes.
        choose: whether to compare drafts as well.
        look: whether to take a snapshot as well.
    """
    target = specjax.Target.from_pretrained(directory / "target", dtype=np.float32, mesh=mesh)
    drafter = DraftModel.from_pretrained(
        directory / "draft", draft=Chain(2), dtype=np.float32, mesh=mesh
    )
    options = GenerationOptions(
        NEW_TOKENS, Sampling(temperature=np.array([0.0, 1.0, 0.7, 0.0])), jax.random.key(3)
    )
    whole = specjax.generate(target, drafter, PROMPTS, LENGTHS, **vars(options))
    parts = list(specjax.stream(target, drafter, PROMPTS, LENGTHS, **vars(options), steps=3))
    constrained = specjax.generate(
        target, drafter, PROMPTS, LENGTHS, **vars(replace(options, grammar=grammars()))
    )
    results = {
        "generate": as_lists(whole),
        "stream": [as_lists(part) for part in parts],
        "grammar": as_lists(constrained),
    }
    if look:
        snapshot = take_snapshot(target, drafter, PROMPTS[0].tolist(), steps=4)
        results["snapshot"] = as_lists(vars(snapshot))
    if not choose:
        return results
    timed = costs._timed

    def clock(run: Any, *arguments: Any) -> tuple[float, Any]:
        return drafting if run is costs._propose else 1.0, timed(run, *arguments)[1]

    with mock.patch.object(costs, "_timed", clock):
        greedy = GenerationOptions(NEW_TOKENS)
        compared = compare_drafts(
            target, PromptLookup(), PROMPTS, LENGTHS, options=greedy, longest=2
        )
    speedups = {str(candidate.draft): candidate.speedup for candidate in compared.candidates}
    return results | {"speedups": speedups, "survival": compared.acceptance.survival}


def corpus_errors(directory: Path, mesh: Mesh, process: int) -> list[str]:
    """Return the messages of files that differ between the processes, or are in one of them."""

    def letters(piece: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in piece]}

    messages, config = [], specjax.Target.from_pretrained(directory / "target").config
    for name, texts in (("same", ("abc", "abc")), ("differs", ("abc", "abd")), ("one", ("ab", ""))):
        file = directory / f"{name}-{process}"
        if texts[process]:
            file.write_text(texts[process])
        try:
            load_drafter("suffix", 2, config, None, mesh, letters, corpus=file)
        except InputError as error:
            messages.append(str(error).replace(str(file), "FILE"))
        else:
            messages.append("")
    return messages


def as_lists(arrays: Any) -> Any:
    """Return the leaves of ``arrays`` as nested lists."""
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(arrays)]


def main(directory: Path, coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(coordinator, num_processes=2, process_id=process)
    assert jax.local_device_count() == 1 and jax.device_count() == 2
    drafting = FREE if process else SLOW
    results = {
        "data": decode(directory, make_mesh(data=2), drafting, choose=True, look=False),
        "model": decode(
            directory, make_mesh(model=2), drafting, choose=False, look=(directory / LOOK).exists()
        ),
    }
    messages = corpus_errors(directory, make_mesh(data=2), process)
    (directory / f"{process}.messages").write_text(json.dumps(messages))
    if process == 0:  # a model on a process's own device waits for no other process
        assert costs.agreed(np.ones(1), make_mesh(devices=jax.local_devices())) == 1
    (directory / f"{process}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
