"""The options of ``specjax plan``: what each means, which go together, and the shape that a name stands for."""

import os
from dataclasses import dataclass

from specjax.chips import find_chip
from specjax.errors import InputError
from specjax.models import huggingface
from specjax.models.config import ModelConfig
from specjax.models.shapes import PUBLISHED, published
from specjax.planning import roofline
from specjax.reports import pictures
from specjax.sampling import Rule

_MOST_ROWS, _LONGEST_CHAIN = 2**20, 256


@dataclass(frozen=True)
class PlanConfig:
    """Reckon what speculation should gain: give --cost, or --target and --drafter for the roofline of a chip, or with --measure
    for this machine: which chain or tree is fastest, from measured times and acceptance.

    Attributes:
        alpha: acceptance rate, the chance that a drafted token is accepted.
        cost: time of a drafting step over the time of a target forward (c).
        operations: arithmetic operations of the drafter a token over the target's (c-hat); by default the cost.
        target: instead of a cost, the model to generate from: a published shape such as llama-3.1-8b, a directory or a hub id.
        drafter: its draft model, named likewise; "self" is the target itself with a draft cache.
        draft_cache: entries that the drafter keeps of a row's cache; by default all.
        chip: the accelerator that target and drafter share.
        batch: rows decoded together; the table has a line for each number given.
        context: tokens in each row's cache.
        longest: longest chain to look at, in tokens; with measure at most 8.
        plot: a picture to write: .png, .pdf or .svg.
        measure: run target and drafter here on the prompts, and compare chains with trees.
        prompts: with measure, a file with one prompt a line (plain, or JSON with "prompt" or "text"); 32 are read.
        temperature: with measure, of the generation; 0 is greedy.
        rule: with measure, as in generate.
        contexts: with measure and a compressed cache (--drafter streaming or snapkv): speed-up against rows for each of these
            numbers of tokens. The prompts must be as long as the longest.
        budgets: with contexts, numbers of slots of the drafter's cache to choose from.
        compile: chips to compile for, which need not be here: h100, or TPUs such as v5e:2x4, v5p:2x2x2, v6e:2x4. Needs
            specjax[compile], and for h100 specjax[compile-cuda].
        mesh: with compile, devices by axis: data (splits the rows) and model (splits the weights).
        draft: with compile, shape of the drafts, as in generate; by default the drafter's own.
        train: with compile, a configuration of a training: one of its steps is compiled.
        json: with compile, print JSON and no tables.
    """

    alpha: float = 0.8
    cost: float | None = None
    operations: float | None = None
    target: str = ""
    drafter: str = ""
    draft_cache: int | None = None
    chip: str = "h100"
    batch: tuple[int, ...] = (1, 4, 16, 64)
    context: int = 1024
    longest: int = roofline.LONGEST
    plot: str = ""
    measure: bool = False
    prompts: str = ""
    temperature: float = 0.0
    rule: Rule | None = None
    contexts: tuple[int, ...] = ()
    budgets: tuple[int, ...] = (128, 256, 512)
    compile: str = ""
    mesh: tuple[int, int] = (1, 1)
    draft: str = ""
    train: str = ""
    json: bool = False


def check_options(config: PlanConfig) -> None:
    """Refuse what cannot be used, or would not be read, before any model is looked up."""
    refuse_unread(config, "without --compile", "mesh", "draft", "train", "json")
    if config.measure:
        refuse_unread(config, "with --measure", "alpha", "chip", "context", "cost", "draft_cache")
    else:
        refuse_unread(config, "without --measure", "prompts", "temperature", "rule", "contexts")
    if not config.contexts:
        refuse_unread(config, "without --contexts", "budgets")
    if min(config.batch, default=0) < 1:
        raise InputError(f"batch={min(config.batch, default=())}: give at least one number of rows, each at least 1")
    if max(config.batch) > _MOST_ROWS:
        raise InputError(f"batch={max(config.batch)}: give at most {_MOST_ROWS} rows")
    find_chip(config.chip)
    if not 1 <= config.longest <= _LONGEST_CHAIN:
        raise InputError(
            f"longest={config.longest}: the longest chain to look at has at least 1 token and at most {_LONGEST_CHAIN}"
        )
    if (config.cost is None) == (not config.target):
        raise InputError("cost: give either --cost C, or --target MODEL and --drafter MODEL to have it reckoned")
    for name in ("operations",) if config.target else ("drafter", "draft_cache"):
        if (value := getattr(config, name)) not in (None, ""):
            partner = "--cost" if config.target else "--target"
            raise InputError(f"{name}={value}: goes with {partner}, which is not given; leave it out")
    if config.plot:
        pictures.check_path("plot", config.plot)


def refuse_unread(config: PlanConfig, when: str, *names: str) -> None:
    """Refuse those of the named options that were given and would not be read."""
    for name in names:
        if (value := getattr(config, name)) != getattr(PlanConfig, name):
            raise InputError(f"{name}={value}: is not read {when}; leave it out")


def find_shape(argument: str, name: str) -> ModelConfig:
    """A published shape of that name, or else what the config.json of the directory or hub id says."""
    elsewhere = "/" in name or os.path.isdir(os.path.expanduser(name))
    if elsewhere and name.lower() not in PUBLISHED:
        return huggingface.read_config(huggingface.locate(name, weights=False))
    try:
        return published(name)
    except InputError as error:
        raise InputError(f"{argument}: {error}; or give a directory or a hub id owner/name") from None
