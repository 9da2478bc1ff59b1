"""Find drafters by name.

A name is ``METHOD:WHERE``, ``METHOD,SETTING=NUMBER:WHERE``, or the bare directory or hub id of a
checkpoint. Several names joined by ``+`` are drafters that draft together. `METHODS` is the one
table of the methods: an entry makes a method known to the command line and to `specjax.load`. Other
installed packages add methods as entry points of the group ``specjax.drafters``. Any class that can
be imported has the name ``package.module:Class@DIRECTORY``. No code is ever loaded from a
checkpoint.
"""

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import processes, sharding, stores, text
from specjax.drafters import chat_variables
from specjax.drafters.base import RULES_PAGE, Drafter
from specjax.drafters.cache_schemes import Scheme, SnapKV, Streaming
from specjax.drafters.corpus import as_files, read_corpus
from specjax.drafters.methods.compressed_cache import CompressedCache
from specjax.drafters.methods.dflash import DFlash
from specjax.drafters.methods.dflash2 import DFlash2
from specjax.drafters.methods.draft_model import DraftModel, check_vocabulary
from specjax.drafters.methods.dspark import DSpark
from specjax.drafters.methods.eagle import Eagle
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.drafters.methods.eagle_layer_attention import EagleWithLayerAttention
from specjax.drafters.methods.early_exit import EarlyExit
from specjax.drafters.methods.gemma4_assistant import Gemma4Assistant
from specjax.drafters.methods.medusa import Medusa
from specjax.drafters.methods.mixture_of_attentions import MixtureOfAttentions
from specjax.drafters.methods.mtp import MTP
from specjax.drafters.methods.peagle import PEagle
from specjax.drafters.methods.prompt_lookup import PromptLookup
from specjax.drafters.methods.suffix import Suffix
from specjax.drafters.methods.token_recycling import TokenRecycling
from specjax.drafters.shared_vocabulary import Asked, share
from specjax.drafters.suffix_index import SuffixIndex, roomy_capacity
from specjax.drafters.together import Together
from specjax.drafters.trained import TrainedDrafter
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import DraftShape, UnionTree
from specjax.errors import InputError, did_you_mean
from specjax.models import config_json, hub
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.quantization import schemes
from specjax.progress import say

GROUP = "specjax.drafters"
"""The group of entry points for methods of other packages.

Each entry point is a `TrainedDrafter` class, or a `DraftingMethod`.
"""

OWN_CLASS = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):([A-Za-z_]\w*)@(.+)", re.DOTALL)
"""The pattern of ``package.module:Class@DIRECTORY``.

It differs from ``METHOD:WHERE`` by the dot before the colon and by the @.
"""

_OWN_USAGE = "package.module:Class@DIRECTORY for a class of your own"


@dataclass(frozen=True)
class DrafterRequest:
    """The arguments that a drafter is made from.

    Attributes:
        name: the whole name, for messages.
        where: the part after the method: a directory, a hub id or a number, depending on the
            method. It may be empty.
        target: the configuration of the target.
        draft: the shape of the drafts; None is the default of the method.
        dtype: the data type of the parameters; None is the default of `Target.from_pretrained`.
        mesh: the mesh of the target.
        tokenizer: the target's tokenizer; None if it is not known.
        weights: the quantization of the weights, as for `Target.from_pretrained`.
        settings: the numbers that the name sets, see `DraftingMethod`.
        files: the files of the checkpoint, if they are open already.
        corpus: text files to draft from, see `load_drafter`.
    """

    name: str
    where: str
    target: ModelConfig
    draft: DraftShape | None = None
    dtype: DTypeLike | None = None
    mesh: Mesh | None = None
    tokenizer: Any = None
    weights: schemes.Weights = schemes.AS_STORED
    settings: Mapping[str, int] = field(default_factory=dict)
    files: CheckpointFiles | None = None
    corpus: tuple[str | Path, ...] = ()

    @property
    def draft_given(self) -> dict[str, Any]:
        """The keyword argument ``draft``, if there is one."""
        return {} if self.draft is None else {"draft": self.draft}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``from_pretrained``."""
        return {
            **self.draft_given,
            "dtype": self.dtype,
            "mesh": self.mesh,
            "weights": self.weights,
            **self.settings,
        }


@dataclass(frozen=True)
class DraftingMethod:
    """A method of drafting.

    Attributes:
        usage: the forms of its names.
        make: makes the drafter of a request. It must raise an `InputError` for an invalid request
            before it reads any weights.
        recognises: takes the fields of a config.json and the names of the tensors, and returns
            whether the checkpoint belongs to this method. There are no names if the checkpoint is
            on the hub, because its weights have not been downloaded yet. None: the method has no
            checkpoints, and WHERE is not a path.
        trained: the class of its drafters, if they are trained for a target.
        translates: whether the tokenizer of a checkpoint may differ from the target's. ``make``
            must compare them then.
        takes: the settings that a name may have: keyword arguments of ``trained.from_pretrained``
            that are integers.
        settings: the settings that a name has; none for the methods in `METHODS`.
        takes_corpus: whether its drafters can draft from text files.
    """

    usage: str
    make: Callable[[DrafterRequest], Drafter]
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool] | None = None
    trained: type[TrainedDrafter] | None = None
    translates: bool = False
    takes: tuple[str, ...] = ()
    settings: Mapping[str, int] = field(default_factory=dict)
    takes_corpus: bool = False

    @classmethod
    def of(
        cls, name: str, kind: type[TrainedDrafter], takes: tuple[str, ...] = ()
    ) -> "DraftingMethod":
        """Return a method whose drafters are checkpoints of a class.

        Args:
            name: the name of the method.
            kind: the class of the drafters.
            takes: the settings that a name may have.
        """

        def make(request: DrafterRequest) -> Drafter:
            return kind.from_pretrained(request.files or request.where, **request.options)

        with_settings = "".join(f" or {name},{setting}=NUMBER:DIRECTORY" for setting in takes)
        usage = f"{name}:DIRECTORY or {name}:OWNER/NAME{with_settings}"
        return cls(usage, make, kind.checkpoint_format.recognises, kind, takes=takes)


# --- the methods ----------------------------------------------------------------------------------


def _make_prompt_lookup(request: DrafterRequest) -> Drafter:
    if request.where:
        longest = {"max_ngram": _whole(request, "prompt-lookup:MAX_NGRAM, such as prompt-lookup:3")}
    else:
        longest = {}
    drafter = PromptLookup(**longest, **request.draft_given)
    drafter.check_draft()
    return drafter


def _make_suffix(request: DrafterRequest) -> Drafter:
    if request.where:
        raise InputError(
            f"drafter={request.name!r}: write suffix; --corpus, or corpus=, has the files to draft"
            " from"
        )
    drafter = Suffix(**request.draft_given)
    drafter.check_draft()
    if not request.corpus:
        return drafter
    texts = _read_alike(request)
    # With room, so that an edit of a file needs no other programs.
    index = SuffixIndex.of(texts, roomy_capacity(sum(len(ids) + 1 for ids in texts)))
    if request.mesh is not None:
        everywhere = sharding.named(request.mesh, (), {})
        index = jax.tree.map(lambda values: sharding.put(values, everywhere), index)
    return replace(drafter, index=index)


def _read_alike(request: DrafterRequest) -> list[list[int]]:
    """Return the tokens of a request's files, which must be the same in all processes of the mesh.

    Every process takes part in the comparison, also one that cannot read its files: the others
    would wait for it.
    """
    corpus, mesh = request.corpus, request.mesh
    arguments = corpus, request.tokenizer, request.target.vocab_size
    if mesh is None or not sharding.spans_processes(mesh):
        return read_corpus(*arguments)
    failure, texts = None, []
    try:
        texts = read_corpus(*arguments)
    except InputError as error:
        failure = error
    processes.meet("corpus")  # one process may have read from a slower disk
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(np.array([len(ids), *ids]).tobytes())
    facts = np.frombuffer(bytes([failure is not None]) + digest.digest(), np.uint8)
    all_facts = sharding.of_processes(facts, mesh)
    if failure is not None:
        raise failure
    what = f"corpus={[str(file) for file in corpus]}: process"
    if failed := [process for process, values in all_facts.items() if values[0]]:
        raise InputError(f"{what} {failed[0]} cannot read the files; its own error has the reason")
    first, *_ = all_facts
    for process, values in all_facts.items():
        if not np.array_equal(values, all_facts[first]):
            raise InputError(
                f"{what} {process} has other tokens than process {first}; give all processes the"
                " same files and the same tokenizer"
            )
    return texts


def _make_token_recycling(request: DrafterRequest) -> Drafter:
    usage = "token-recycling:SUCCESSORS, such as token-recycling:8"
    successors = {"successors": _whole(request, usage)} if request.where else {}
    drafter = TokenRecycling(**successors, **request.draft_given)
    drafter.check_draft()
    return drafter


def _make_early_exit(request: DrafterRequest) -> Drafter:
    return EarlyExit(
        layers=_whole(request, "early-exit:LAYERS, such as early-exit:4"), **request.draft_given
    )


def _make_compressed_cache(scheme: Scheme, request: DrafterRequest) -> Drafter:
    method = request.name.partition(":")[0]
    usage = f"{method}:BUDGET, the slots of a row, such as {method}:256"
    budget = {"budget": _whole(request, usage)} if request.where else {}
    return CompressedCache(scheme=scheme, **budget, **request.draft_given)


def _make_draft_model(allowed: Asked | None, request: DrafterRequest) -> Drafter:
    if request.draft is not None:
        request.draft.check(request.target.vocab_size)
    files = hub.open_checkpoint(request.files or request.where, weights=False)
    config_json.check_whole(files)
    config, shared = config_json.read_config(files), None
    if request.tokenizer is not None and text.has_tokenizer(files.directory):
        tokenizer = text.load_tokenizer(files.directory)
        shared = share(
            request.tokenizer,
            tokenizer,
            allowed,
            sizes=(request.target.vocab_size, config.vocab_size),
        )
    if shared is None:
        check_vocabulary(config, request.target)
    drafter = DraftModel.from_pretrained(files, **request.options)
    return replace(drafter, shared=shared)


def _whole(request: DrafterRequest, usage: str) -> int:
    """Return WHERE as an integer of at least 1."""
    if not (_is_whole(request.where) and int(request.where) > 0):
        raise InputError(f"drafter={request.name!r}: write {usage}")
    return int(request.where)


def _is_whole(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= 9


METHODS: dict[str, DraftingMethod] = {
    "prompt-lookup": DraftingMethod(
        "prompt-lookup or prompt-lookup:MAX_NGRAM", _make_prompt_lookup
    ),
    "token-recycling": DraftingMethod(
        "token-recycling or token-recycling:SUCCESSORS", _make_token_recycling
    ),
    "suffix": DraftingMethod("suffix", _make_suffix, takes_corpus=True),
    "early-exit": DraftingMethod("early-exit:LAYERS", _make_early_exit),
    "streaming": DraftingMethod(
        "streaming or streaming:BUDGET", partial(_make_compressed_cache, Streaming())
    ),
    "snapkv": DraftingMethod("snapkv or snapkv:BUDGET", partial(_make_compressed_cache, SnapKV())),
    "dflash2": DraftingMethod.of("dflash2", DFlash2),
    "dflash": DraftingMethod.of("dflash", DFlash),
    "dspark": DraftingMethod.of("dspark", DSpark),
    "peagle": DraftingMethod.of(
        "peagle", PEagle
    ),  # before eagle3, whose fields its checkpoints have too
    "eagle3": DraftingMethod.of("eagle3", Eagle3),
    "eagle-lsa": DraftingMethod.of("eagle-lsa", EagleWithLayerAttention),
    "eagle": DraftingMethod.of("eagle", Eagle),
    "moa": DraftingMethod.of("moa", MixtureOfAttentions, takes=("tli",)),
    "mtp": DraftingMethod.of("mtp", MTP),
    "medusa": DraftingMethod.of("medusa", Medusa),
    "gemma4-assistant": DraftingMethod.of("gemma4-assistant", Gemma4Assistant),
    "draft-model": DraftingMethod(
        "draft-model:DIRECTORY or draft-model:OWNER/NAME",
        partial(_make_draft_model, None),
        recognises=lambda config, _: config.get("model_type") in config_json.SUPPORTED,
        translates=True,
    ),
    "draft-model-intersect": DraftingMethod(
        "draft-model-intersect:DIRECTORY or draft-model-intersect:OWNER/NAME",
        partial(_make_draft_model, "intersect"),
        recognises=lambda config, _: False,
        translates=True,
    ),
}
"""All methods by name.

Checkpoints are recognised in this order. A method that looks for its own fields stands before
``draft-model``, which accepts any model. ``draft-model-intersect`` is never recognised, so users
must name it.
"""


# --- names ----------------------------------------------------------------------------------------


def load_drafter(
    name: str,
    draft: DraftShape | int | None,
    target: ModelConfig,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    tokenizer: Any = None,
    weights: schemes.Weights = schemes.AS_STORED,
    corpus: str | Path | Sequence[str | Path] = (),
) -> Drafter:
    """Load the drafter with a name.

    Args:
        name: ``METHOD:WHERE``, or the directory or hub id of a checkpoint, whose config.json shows
            its method. ``moa,tli=1:WHERE`` states what a published Mixture of Attentions does not.
            A class outside the library is ``package.module:Class@DIRECTORY``. ``NAME+NAME`` makes a
            `Together` of several drafters (see `split_name`).
        draft: the shape of the drafts; None is the default of the method. Several drafters need a
            `UnionTree`, such as "chain:4+chain:8".
        target: the configuration of the target.
        dtype: the data type of the parameters, if there are any.
        mesh: the mesh of the target.
        tokenizer: the target's tokenizer. If the drafter's checkpoint has a tokenizer too, they
            must agree. A draft model's tokenizer may differ if it shares half of the smaller
            vocabulary; with ``draft-model-intersect:WHERE`` any overlap is enough. If the drafter
            was trained on chats with other variables of the chat template, there is a warning.
        weights: the quantization of the weights, as for `Target.from_pretrained`.
        corpus: text files that ``suffix`` drafts from, or one of them, of at most 16 MiB together.
            They need the ``tokenizer``. All processes of a mesh must have the same files.

    Raises:
        InputError: There is no such method or checkpoint, or it does not fit the target. The error
            comes before weights are read.

    Examples:
        >>> from specjax.drafters.registry import load_drafter
        >>> load_drafter("early-exit:1", draft="chain:2", target=config)
        EarlyExit(layers=1, draft=Chain(length=2, stop_below=0.0))
        >>> print(load_drafter("early-exit:1+prompt-lookup", None, config).draft_shape)
        union of (chain of 4; chain of 8), 13 nodes, 8 deep
        >>> load_drafter("eagle4", draft=None, target=config)
        Traceback (most recent call last):
        specjax.errors.InputError: drafter='eagle4': no method of that name, no directory and ...
    """
    corpus = as_files(corpus)
    names = split_name(name)
    if len(names) > 1:
        arguments = target, dtype, mesh, tokenizer, weights
        return _load_together(names, name, draft, arguments, corpus)
    method, where, files = find(name)
    if corpus and not method.takes_corpus:
        raise without_corpus(name, corpus)
    if tokenizer is not None and method.recognises is not None and not method.translates:
        files = hub.open_checkpoint(files or where, weights=False)
        if text.has_tokenizer(files.directory):
            text.check_same_tokenizer(tokenizer, text.load_tokenizer(files.directory))
    shape = None if draft is None else as_shape(draft)
    drafter = method.make(
        DrafterRequest(
            *(name, where, target, shape, dtype, mesh, tokenizer, weights, method.settings, files),
            corpus=corpus,
        )
    )
    if tokenizer is not None and method.recognises is not None:
        files = hub.open_checkpoint(files or where, weights=False)
        chat_variables.compare(f"drafter={name!r}", files, tokenizer)
    return drafter


def _load_together(
    names: Sequence[str],
    name: str,
    draft: DraftShape | int | None,
    arguments: tuple[Any, ...],
    corpus: Sequence[str | Path],
) -> Together:
    """Load several drafters that draft together. ``arguments`` are the others of `load_drafter`."""
    if corpus and not takes_corpus(name):
        raise without_corpus(name, corpus)
    union = None if draft is None else as_shape(draft)
    if union is None:
        shapes = (None,) * len(names)
    elif isinstance(union, UnionTree) and len(union.shapes) == len(names):
        shapes = union.shapes
    else:
        raise InputError(
            f"draft={draft!r}: drafter={name!r} has {len(names)} parts; give one shape for each,"
            f" such as {'+'.join(['chain:4'] * len(names))!r}"
        )
    files = [corpus if corpus and takes_corpus(part) else () for part in names]
    parts = (
        load_drafter(part, shape, *arguments, corpus=of_part)
        for part, shape, of_part in zip(names, shapes, files, strict=True)
    )
    return Together(tuple(parts), draft=union)


def without_corpus(name: str, corpus: Sequence[str | Path]) -> InputError:
    """Return the error for files that are given to a drafter, with this name, that reads none.

    Examples:
        >>> from specjax.drafters.registry import without_corpus
        >>> print(str(without_corpus("prompt-lookup", ["a.txt"])).partition(";")[0])
        corpus=['a.txt']: drafter='prompt-lookup' reads no files
    """
    takes = [method for method, entry in METHODS.items() if entry.takes_corpus]
    return InputError(
        f"corpus={[str(file) for file in corpus]}: drafter={name!r} reads no files; use the drafter"
        f" {' or '.join(takes)}, alone or as one of several, or leave the files out"
    )


def takes_corpus(name: str) -> bool:
    """Return whether the drafter with this name, or one that it joins, drafts from text files.

    Examples:
        >>> from specjax.drafters.registry import takes_corpus
        >>> takes_corpus("early-exit:1+suffix"), takes_corpus("prompt-lookup")
        (True, False)
    """
    return any(find(part)[0].takes_corpus for part in split_name(name))


def split_name(name: str) -> list[str]:
    """Return the names of the drafters in a name that may join several by ``+``.

    A ``+`` joins if the name of a method, a class, or "embedded" follows. Otherwise it belongs to
    the name of a directory.

    Examples:
        >>> from specjax.drafters.registry import split_name
        >>> split_name("eagle3:runs/a+b+prompt-lookup:4")
        ['eagle3:runs/a+b', 'prompt-lookup:4']
    """
    if "+" not in name or os.path.isdir(os.path.expanduser(name)):
        return [name]
    methods = "|".join(map(re.escape, (*METHODS, *_entry_points(), "embedded")))
    begins = rf"(?:{methods})(?:[:,+]|$)|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+:[A-Za-z_]\w*@"
    return re.split(rf"\+(?={begins})", name)


def find(name: str) -> tuple[DraftingMethod, str, CheckpointFiles | None]:
    """Return the method of a name, with its settings, the WHERE of the name, and the files there.

    The files are None if they were not needed to recognise the method.

    Raises:
        InputError: There is no such method, or the method has no such setting.

    Examples:
        >>> from specjax.drafters.registry import find
        >>> method, where, _ = find("moa,tli=2:runs/best")
        >>> method.settings, where
        ({'tli': 2}, 'runs/best')
        >>> find("moa,layers=2:runs/best")
        Traceback (most recent call last):
        specjax.errors.InputError: drafter='moa,layers=2:runs/best': 'layers=2' is no setting ...
    """
    if own_class := OWN_CLASS.fullmatch(name):
        return _method_of_class(name, own_class[1], own_class[2]), own_class[3], None
    before, colon, where = name.partition(":")
    # Without a colon a comma belongs to the directory's name.
    kind, *settings = before.split(",") if colon else [before]
    points = {} if kind in METHODS else _entry_points()
    if kind in METHODS or kind in points:
        method = METHODS[kind] if kind in METHODS else _method_of_entry_point(points[kind])
        if method.recognises is not None and not where:
            raise InputError(f"drafter={name!r}: write {method.usage}")
        return replace(method, settings=_settings(name, kind, method, settings)), where, None
    forms = [
        *(method.usage for method in METHODS.values()),
        *(f"{point}:DIRECTORY" for point in points),
        _OWN_USAGE,
    ]
    usages = "; ".join(forms)
    is_checkpoint = (
        before == "embedded"
        or stores.is_url(name)
        or (not colon and ("/" in name or os.path.isdir(os.path.expanduser(name))))
    )
    if not is_checkpoint:
        hint = did_you_mean(kind, (*METHODS, *points, "embedded", "none"))
        raise InputError(
            f"drafter={name!r}: no method of that name, no directory and no hub id"
            f" owner/name{hint}; methods: {usages}"
        )
    files = hub.open_checkpoint(name, weights=False)
    config, tensors = files.raw, files.tensor_names
    for method in _methods_by_content(points):
        if method.recognises is not None and method.recognises(config, tensors):
            return method, name, files
    raise InputError(
        f"drafter={name!r}: {files.file} belongs to no known method"
        f" (model_type={config.get('model_type')!r}; draft models may be"
        f" {', '.join(config_json.SUPPORTED)}); if a package has its class, write"
        f" package.module:Class@{name}; methods: {usages}"
    )


def _settings(name: str, kind: str, method: DraftingMethod, words: list[str]) -> dict[str, int]:
    """Parse the ``SETTING=NUMBER`` parts of the ``name`` of a drafter."""
    settings: dict[str, int] = {}
    for word in words:
        setting, _, number = word.partition("=")
        if setting not in method.takes or setting in settings:
            what = "is given twice" if setting in settings else f"is no setting of {kind}"
            raise InputError(
                f"drafter={name!r}: {word!r} {what}{did_you_mean(setting, method.takes)}; write"
                f" {method.usage}"
            )
        if not _is_whole(number):
            raise InputError(
                f"drafter={name!r}: {setting} must be a whole number of at most nine digits; write"
                f" {method.usage}"
            )
        settings[setting] = int(number)
    return settings


# --- methods of other packages --------------------------------------------------------------------


def _entry_points() -> dict[str, metadata.EntryPoint]:
    """Return the entry points of other packages by name. They cannot replace those of `METHODS`."""
    return {
        point.name: point
        for point in metadata.entry_points(group=GROUP)
        if point.name not in METHODS
    }


def _methods_by_content(points: Mapping[str, metadata.EntryPoint]) -> Iterator[DraftingMethod]:
    """Yield all methods in the order in which checkpoints are recognised.

    Draft models, which accept any model, come last.
    """
    yield from (method for method in METHODS.values() if not method.translates)
    for point in points.values():
        try:
            yield _method_of_entry_point(point)
        except InputError as error:  # a broken package must not disable the others
            say(f"{error}; it is ignored")
    yield from (method for method in METHODS.values() if method.translates)


def _method_of_entry_point(point: metadata.EntryPoint) -> DraftingMethod:
    where = f"drafter={point.name!r}: {point.value}, of the entry points {GROUP},"
    try:
        value = point.load()
    except Exception as error:  # importing a foreign package may fail in any way
        raise InputError(
            f"{where} cannot be imported ({type(error).__name__}: {error}); repair or remove that"
            " package"
        ) from error
    if isinstance(value, DraftingMethod):
        return value
    return DraftingMethod.of(point.name, _check_class(value, where))


def _method_of_class(name: str, module: str, class_name: str) -> DraftingMethod:
    where = f"drafter={name!r}: {module}"
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # importing a foreign module may fail in any way
        remedy = "install the package that has it, or name its folder in PYTHONPATH"
        raise InputError(
            f"{where} cannot be imported ({type(error).__name__}: {error}); {remedy}"
        ) from error
    if not hasattr(loaded, class_name):
        raise InputError(f"{where} has no {class_name}{did_you_mean(class_name, vars(loaded))}")
    return DraftingMethod.of(
        name.partition("@")[0], _check_class(getattr(loaded, class_name), f"{where}:{class_name}")
    )


def _check_class(value: Any, where: str) -> type[TrainedDrafter]:
    if not (isinstance(value, type) and issubclass(value, TrainedDrafter)):
        raise InputError(
            f"{where} is {value!r}: give a subclass of specjax.drafters.TrainedDrafter;"
            f" {RULES_PAGE} shows one"
        )
    return value
