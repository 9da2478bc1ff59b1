"""Command line: train, continue, save and evaluate."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import tyro

from benchmarks.tools_model.encoding import make_tokenizer
from benchmarks.tools_model.evaluation import (
    LARGEST,
    SMALLEST,
    Hits,
    evaluate,
    held_out,
    predict_chats,
)
from benchmarks.tools_model.teaching import Stage, train
from specjax import text
from specjax.files import write_text
from specjax.models import generation_config
from specjax.models.transformer import Target
from specjax.progress import show_waits

STAGES = (Stage(rows=240, length=1024), Stage(rows=16, length=4096, lists=(0.5, 0.8)))
STEPS = 1200


@dataclass(frozen=True)
class ToolsModelConfig:
    """Train a model that calls tools, or evaluate it.

    Attributes:
        directory: the directory of the run. The model is in its folder ``model``. A run that was
            killed continues there.
        seed: the seed of the weights and the data.
        learning_rate: the largest learning rate.
        evaluate: the number of held-out conversations to answer with the model that is there; 0 to
            train instead.
        predict: the number of held-out conversations whose answers to predict in one pass each,
            which is many times as fast; 0 for none.
        smallest: the smallest list of tools in the evaluation, in characters of JSON.
        largest: the largest one.
    """

    directory: str
    seed: int = 0
    learning_rate: float = 3e-3
    evaluate: int = 0
    predict: int = 0
    smallest: int = SMALLEST
    largest: int = LARGEST


def save(target: Target, directory: Path) -> None:
    """Write a checkpoint with tokenizer and chat template, which ``specjax serve`` reads.

    Programs that state no temperature get the likeliest tokens.
    """
    target.save_pretrained(directory, dtype=jnp.float32)
    make_tokenizer().save_pretrained(directory)
    path = directory / generation_config.FILE
    greedy = {"do_sample": True, "temperature": 1.0, "top_k": 1}
    write_text(path, json.dumps(json.loads(path.read_text()) | greedy, indent=2) + "\n")


def main(config: ToolsModelConfig) -> None:
    """Train and save, or evaluate."""
    directory = Path(config.directory)
    if config.predict:
        target = Target.from_pretrained(directory / "model")
        chats = held_out(config.predict, config.smallest, config.largest)
        thirds: list[Hits] = []
        for thirds in predict_chats(target, text.load_tokenizer(directory / "model"), chats):
            print(sum(thirds, Hits()).line(), flush=True)
        for name, hits in zip(("small", "middle", "large"), thirds, strict=True):
            print(f"{name} lists: {hits.line()}")
        return
    if config.evaluate:
        target = Target.from_pretrained(directory / "model")
        chats = held_out(config.evaluate, config.smallest, config.largest)
        show_waits()
        scores = evaluate(target, text.load_tokenizer(directory / "model"), chats)
        for name, result in scores.items():
            print(f"{name}: {result.line()}")
        return
    train(
        directory,
        STAGES,
        STEPS,
        config.seed,
        config.learning_rate,
        save=lambda target: save(target, directory / "model"),
    )


if __name__ == "__main__":
    main(tyro.cli(ToolsModelConfig))
