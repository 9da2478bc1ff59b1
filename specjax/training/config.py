"""The configuration of a training run."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from specjax.config import ConfigError
from specjax.training.methods import AnyMethod, Lm


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    Attributes:
        source: ``stdlib`` (the running Python's own source); a file, a directory or a glob; or ``hf:OWNER/NAME``, with
            ``:SPLIT`` or without, of the Hugging Face hub. Records of JSONL and Parquet files hold ``text``, or a conversation
            as ``messages`` or ``conversations``, in OpenAI's form or ShareGPT's. Every other file is a text. Records that
            ``specjax regenerate`` wrote are read in the tokens that they have beside, where those are this tokenizer's.
        tokenizer: a directory with tokenizer.json; empty: the target's, or where there is none a byte-level BPE
            tokenizer trained on the source.
        vocab_size: of a tokenizer trained here.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template is given beside the messages, as JSON: '{"enable_thinking": false}'.
        responses_only: of conversations, learn from what the assistant wrote alone; of records with the tokens that they were
            written in, from what the target wrote.
        window: tokens a training window.
        batch: windows a step.
        holdout: share of the documents kept for evaluation.

    Examples:
        >>> from specjax.training.config import DataConfig
        >>> DataConfig(source="chats.jsonl", window=2048, batch=4).holdout
        0.02
    """

    source: str = "stdlib"
    tokenizer: str = ""
    vocab_size: int = 3072
    chat_template: str = ""
    chat_template_kwargs: str = ""
    responses_only: bool = True
    window: int = 512
    batch: int = 8
    holdout: float = 0.02


@dataclass(frozen=True)
class OptimizerConfig:
    """Linear warmup, cosine decay to ``final_share`` of the peak; ``clip`` bounds the global gradient norm.

    ``method`` is ``adamw``, or ``muon``: orthogonalised updates for the layers' matrices (scaled to AdamW's size, so that
    one learning rate serves both) and AdamW for the rest. Muon is for short trainings from random weights.

    Examples:
        >>> from specjax.training.config import OptimizerConfig
        >>> OptimizerConfig(method="muon", learning_rate=1e-3).warmup_steps
        100
    """

    method: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    final_share: float = 0.05
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0


_ChosenMethod = Annotated[AnyMethod, tyro.conf.AvoidSubcommands]
"""The file's choice stands on the command line too: options are those of the one method, without a subcommand."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run: ``python -m specjax train --config configs/demo_target.yaml``.

    Attributes:
        output: directory of the run, see `specjax.training.run_directory`: the student lies under ``best/`` and ``latest/``.
        method: what is trained and how; its ``name`` is chosen in the file, and says which other options it has.
        seed: of the random weights, the order of the data and the steps' noise.
        steps: optimiser steps.
        evaluate_every: steps between two evaluations on held-out windows.
        checkpoint_every: steps between two checkpoints; a killed run continues from the newest.
        init_from: directory or hub id of a student to begin with, instead of random weights. The run is a new one all the same:
            to continue one, give its ``output``.
        accumulate: parts in which the rows of a batch are worked out one after another, to save memory.
        compute_dtype: data type of the target and of the student's products; its weights are kept and trained in float32.
        export_dtype: data type of the exported student.
        dry_run: say what the run would take, and train nothing.
        mesh: devices by axis, data (splits the batch) and model (splits heads, MLP units and the vocabulary).

    Examples:
        >>> from specjax.training.config import TrainConfig
        >>> from specjax.training.methods import Eagle3Training
        >>> config = TrainConfig(method=Eagle3Training(target="embedded"), steps=500)
        >>> config.check()
        >>> TrainConfig(method=Eagle3Training(target="embedded"), steps=0).check()
        Traceback (most recent call last):
        specjax.config.ConfigError: steps=0: must be at least 1
    """

    output: str = "runs/model"
    method: _ChosenMethod = Lm()
    seed: int = 0
    steps: int = 1000
    evaluate_every: int = 200
    checkpoint_every: int = 100
    init_from: str = ""
    accumulate: int = 1
    compute_dtype: Literal["bfloat16", "float32"] = "float32"
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    dry_run: bool = False
    mesh: tuple[int, int] = (1, 1)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    def check(self) -> None:
        """Refuse, with a ConfigError, values that cannot be used together or lie out of range."""
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.seed < 2**63:  # as `specjax.sampling.make_key` has it
            raise ConfigError(f"seed={self.seed}: must be a whole number, at least 0 and below 2**63")
        if self.accumulate < 1 or self.data.batch % self.accumulate:
            raise ConfigError(f"accumulate={self.accumulate}: must divide data.batch={self.data.batch}")
        if self.data.window < 2 or self.data.batch < 1:
            raise ConfigError(f"data.window={self.data.window}, data.batch={self.data.batch}: at least 2 and 1")
        if not 0 < self.data.holdout < 1:
            raise ConfigError(f"data.holdout={self.data.holdout}: a share between 0 and 1")
        if min(self.mesh) >= 1 and self.data.batch % self.mesh[0]:  # `make_mesh` refuses sizes below 1
            raise ConfigError(
                f"data.batch={self.data.batch}: must be a multiple of the {self.mesh[0]} devices of mesh's data axis"
            )
        self.method.check(self.data.window)
