"""The configuration of a training run."""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

import tyro

from specjax import stores
from specjax.config import ConfigError
from specjax.errors import check_minimum
from specjax.training.methods import AnyMethod, Lm
from specjax.training.unusable import MAX_UNUSABLE, check_share

Packing = Literal["windows", "documents"]
"""How documents become windows, see `specjax.training.packing`."""


@dataclass(frozen=True)
class DataConfig:
    """The data to train on.

    Attributes:
        source: ``stdlib`` (the source code of the running Python's standard library); a file, a
            directory or a glob, also in a bucket (``s3://BUCKET/PATH``, ``gs://BUCKET/PATH``), from
            where files are copied into a cache; or a data set of the Hugging Face hub,
            ``hf:OWNER/NAME``, ``hf:OWNER/NAME:SPLIT`` or ``hf:OWNER/NAME@CONFIG:SPLIT``. A record
            of a JSONL, JSON or Parquet file has ``text``, or a conversation in one of the usual
            forms, such as ``messages`` or ``conversations``. Every other file is a text. If a
            record of ``specjax regenerate`` has tokens of this tokenizer, they are used instead of
            its text.
        tokenizer: a directory with tokenizer.json. Empty: the target's tokenizer, or without a
            target a byte-level BPE tokenizer trained on the source.
        vocab_size: the vocabulary size of a tokenizer trained here.
        chat_template: a file with a Jinja chat template, instead of the tokenizer's own.
        chat_template_kwargs: arguments of the chat template beside the messages, as JSON:
            '{"enable_thinking": false}'.
        responses_only: whether only the assistant's messages of a conversation are labels. In
            records with generated tokens, only the tokens that the target generated are labels.
        window: the number of tokens of a training window.
        batch: the number of windows of a step.
        holdout: the share of the documents that is held out for evaluation.
        max_unusable: the largest share of the records that may be left out because they cannot be
            used; 0 refuses the first.
        cache: a directory for the tokenized data, which several runs and hosts may share. The data
            are then read from there as memory maps, and tokenized once. Empty: they are held in
            memory.
        workers: the number of processes that tokenize. Each takes about 300 MB. The windows do not
            depend on it.
        packing: how documents become windows. ``windows``: they are concatenated, and windows are
            cut from the result wherever they end. ``documents``: each window has whole documents,
            as many as fit, and its rest is empty.

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
    max_unusable: float = MAX_UNUSABLE
    cache: str = ""
    workers: int = 1
    packing: Packing = "windows"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer: linear warmup, then cosine decay to ``final_share`` of the peak learning rate.

    ``clip`` bounds the global norm of the gradient. ``method`` is ``adamw`` or ``muon``. Muon
    orthogonalizes the updates of the layers' matrices, scaled to the size of AdamW's, so that one
    learning rate serves both; AdamW updates all other parameters. Muon is for short trainings from
    random weights.

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

    def check(self) -> None:
        """Raise ConfigError for values that are out of range. None may be negative."""
        for name in ("learning_rate", "clip"):
            if getattr(self, name) == 0:
                raise ConfigError(f"optimizer.{name}=0: must be above 0; the step would be 0")
        for name in ("b1", "b2"):
            if (value := getattr(self, name)) >= 1:
                raise ConfigError(f"optimizer.{name}={value}: must be at least 0, and below 1")
        if self.final_share > 1:
            raise ConfigError(
                f"optimizer.final_share={self.final_share}: must be from 0 to 1, a share of the"
                " peak learning rate"
            )


Resume = Literal["never", "auto", "must"]
"""Whether a run that exists is continued."""

_ChosenMethod = Annotated[AnyMethod, tyro.conf.AvoidSubcommands]
"""The method of a configuration file.

The command line has the options of this method alone, without a subcommand.
"""


@dataclass(frozen=True)
class TrainConfig:
    """One training run: ``python -m specjax train --config configs/demo_target.yaml``.

    Attributes:
        output: the directory of the run, see `specjax.training.run_directory`. The student is saved
            in its folders ``best`` and ``latest``. It may be a folder in a bucket
            (``s3://BUCKET/PATH``, ``gs://BUCKET/PATH``), see `specjax.training.run_store`.
        method: the training method. Its ``name`` is set in the file and decides its other options.
        seed: the random seed of the initial weights, the order of the data and the noise of steps.
        steps: the number of optimizer steps. When a run continues, it may be larger than before.
        evaluate_every: the number of steps between two evaluations on held-out windows. If a
            checkpoint is due as well, it comes first.
        checkpoint_every: the number of steps between two checkpoints. A run that was killed
            continues from the newest.
        checkpoints: the number of newest checkpoints that stay; older ones are deleted.
        resume: whether a run in ``output`` is continued: ``auto`` continues it, or begins one if
            there is none; ``must`` refuses to begin one; ``never`` refuses to continue one.
        init_from: the directory or hub id of a student to start from, instead of random weights.
            This starts a new run. To continue a run, give its ``output``.
        accumulate: the number of parts of a batch that are computed one after the other, to save
            memory.
        compute_dtype: the data type of the target and of the student's matrix products. The
            student's weights are stored and trained in float32.
        export_dtype: the data type of the saved student.
        logging: the service that shows the metrics: ``tensorboard`` (files in the output
            directory), ``wandb`` (Weights & Biases; needs specjax[wandb]) or ``none``. The file
            metrics.jsonl is always written.
        dry_run: whether to print the requirements of the run, and train nothing.
        mesh: the number of devices by axis: data (splits the batch) and model (splits heads, MLP
            units and the vocabulary).

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
    checkpoints: int = 2
    resume: Resume = "auto"
    init_from: str = ""
    accumulate: int = 1
    compute_dtype: Literal["bfloat16", "float32"] = "float32"
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    logging: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    dry_run: bool = False
    mesh: tuple[int, int] = (1, 1)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    def check(self) -> None:
        """Raise ConfigError for values that are out of range or contradict each other."""
        counts = ("steps", "evaluate_every", "checkpoint_every", "checkpoints")
        check_minimum(1, self, counts, error=ConfigError)
        if not 0 <= self.seed < 2**63:  # the range of `specjax.sampling.make_key`
            raise ConfigError(
                f"seed={self.seed}: must be a whole number, at least 0 and below 2**63"
            )
        _check_numbers(self)
        if self.accumulate < 1 or self.data.batch % self.accumulate:
            raise ConfigError(
                f"accumulate={self.accumulate}: must divide data.batch={self.data.batch}"
            )
        check_minimum(2, self.data, ["window"], "data.", ConfigError)
        check_minimum(1, self.data, ["batch", "workers"], "data.", ConfigError)
        self.optimizer.check()
        if not 0 < self.data.holdout < 1:
            raise ConfigError(f"data.holdout={self.data.holdout}: must be between 0 and 1")
        check_share("data.max_unusable", self.data.max_unusable)
        # `make_mesh` raises for sizes below 1.
        if min(self.mesh) >= 1 and self.data.batch % self.mesh[0]:
            raise ConfigError(
                f"data.batch={self.data.batch}: must be a multiple of the {self.mesh[0]} devices of"
                " mesh's data axis"
            )
        if stores.is_url(self.data.cache):
            raise ConfigError(
                f"data.cache={self.data.cache!r}: the windows are read as memory maps; give a local"
                " directory"
            )
        self.method.check(self.data.window)


_SENTINELS = {"mask_token_id": -1, "dpace": -1}
"""The options that may be negative, with the one negative value that has a meaning."""


def _check_numbers(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first number that is not finite, or is negative."""
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if is_dataclass(value):
            _check_numbers(value, f"{name}.")
        elif not isinstance(value, int | float) or value == _SENTINELS.get(field.name):
            continue
        elif not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name}={value}: must be a finite number, at least 0")
