"""The models, drafts and sizes of an engine, checked before anything is compiled."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from specjax import decoding, pipeline, processes, sharding
from specjax.decoding.options import as_key
from specjax.drafters import Drafter, NoDraft
from specjax.drafters.pausable import ROOM, Pausable
from specjax.drafters.with_prediction import WithPrediction
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.choice import Copies
from specjax.serving.device import MAX_STOP_TOKENS, ClientDrafts, EngineDevice, Sizes
from specjax.serving.memory import USUAL_CAPACITY, usual_chunk, usual_page

USUAL_TEXT = 1024
"""Tokens a row that there are pages for, unless asked for otherwise."""


_fold_in = jax.jit(jax.random.fold_in)  # one call of the device in place of many small ones, for every request


@dataclass(frozen=True)
class EngineConfig:
    """The models, drafts and sizes of an engine, before anything is compiled: the same in all processes.

    Attributes:
        target: the target.
        tokenizer: of its text; None: prompts are token ids.
        choices: the drafts to choose from.
        drafters: one for each of them.
        sizes: what programs are compiled for.
        clients: drafts that come from clients.
        max_prediction: longest draft that is copied from a prediction.
        default_sampling: of requests that state no settings of their own; None: greedy.
    """

    target: Target
    tokenizer: Any
    choices: tuple[DraftShape | Copies | None, ...]
    drafters: list[Drafter]
    sizes: Sizes
    clients: ClientDrafts | None
    max_prediction: int
    default_sampling: Sampling | None

    @classmethod
    def of(
        cls,
        target: Target | pipeline.TextGenerator,
        drafter: Drafter | None,
        *,
        rows: int,
        drafts: Sequence[DraftShape | int | str | None] | None,
        capacity: int | None,
        pages: int | None,
        page: int | None,
        chunk: int | None,
        steps: int,
        tokenizer: Any,
        widths: Sequence[int] | None,
        max_logprobs: int,
        max_prediction: int,
        clients: ClientDrafts | None,
    ) -> "EngineConfig":
        """Return what the arguments of `Engine` make. Refuses, with an InputError, those that cannot be used."""
        default_sampling = None
        if isinstance(target, pipeline.TextGenerator):
            if drafter is not None:
                raise InputError("drafter: the generator has its own; give it to specjax.load")
            default_sampling = target.default_sampling
            target, drafter, tokenizer = target.target, target.drafter, target.tokenizer
        target.check_whole()
        drafter = None if isinstance(drafter, NoDraft) else drafter
        on_cpu = sharding.is_on_cpu(target.mesh)
        shapes = _shapes(drafter, drafts)
        drafter = NoDraft() if drafter is None or shapes == (None,) else drafter
        positions = decoding.most_positions(target, drafter)
        page = page or usual_page()
        chunk = chunk or usual_chunk(page, on_cpu=on_cpu)
        capacity = min(positions, USUAL_CAPACITY) if capacity is None else capacity
        groups = groups_of(target.mesh)
        if pages is not None and pages < 1:
            raise InputError(f"pages={pages}: must be at least 1")
        _check_sizes(rows, groups, page, chunk, capacity, positions, steps)
        for name, value, maximum in (
            ("max_logprobs", max_logprobs, target.config.vocab_size),
            ("max_prediction", max_prediction, capacity - 1),
        ):
            if not 0 <= value <= maximum:
                raise InputError(f"{name}={value}: must be from 0 to {maximum}")
        if pages is None:
            pages = -(-rows // groups) * -(-min(capacity, USUAL_TEXT) // page)
            pages = max(pages, -(-capacity // page))
        widths = _widths(rows, widths, on_cpu and groups == 1)
        choices, drafters = _drafters(target, drafter, shapes, max_prediction)
        sizes = Sizes(rows, widths, capacity, pages, page, chunk, steps, max_logprobs)
        return cls(target, tokenizer, choices, drafters, sizes, clients, max_prediction, default_sampling)

    def together(self) -> processes.Processes | None:
        """The processes on whose devices the target lies; None: it is this one's alone."""
        if not sharding.spans_processes(self.target.mesh):
            return None
        if (found := processes.joined()) is None:
            raise InputError("target: its mesh spans several processes: call specjax.processes.join() at the beginning of each")
        return found

    def device(self, together: processes.Processes | None) -> EngineDevice:
        """Free rows. The first of those that work ``together`` tells the others what it does."""
        if together is not None and together.is_first:
            return over_hosts.LeadingDevice(self.target, self.drafters, self.sizes, self.clients, processes=together)
        return EngineDevice(self.target, self.drafters, self.sizes, self.clients)

    def placeholder_settings(self) -> dict[str, Any]:
        """The settings of a text without an end, to warm up with."""
        return self.settings(SamplingParams(max_new_tokens=1, eos_token_ids=()), prompt=2)

    def settings(
        self,
        params: SamplingParams,
        prompt: int,
        *,
        choice: int = 0,
        key: jax.Array | None = None,
        expected: Sequence[int] = (),
    ) -> dict[str, Any]:
        """How a text is drawn, as `device_rows.Text` has it: always of the same types, so that nothing is compiled again.

        Args:
            params: the request's sampling parameters.
            prompt: how many tokens it has.
            choice: the index of the text among several of one request.
            key: in place of that of the seed and ``choice``.
            expected: the tokens of a prediction.
        """
        if not 0 <= (choice := operator.index(choice)) < 2**32:
            raise InputError(f"choice={choice}: must be a whole number, at least 0 and below 2**32")
        # On the host, so that nothing waits for the device, and wherever a given key lies.
        with sharding.on_host():
            own = _fold_in(params.make_key(), np.uint32(choice)) if key is None else as_key(key)
            if own.ndim:
                raise InputError(f"key has shape {own.shape}: give one key")
            checked = params.options().check(self.target.config, 1)
            ids = checked.stop_token_ids[0]
            if len(ids) > MAX_STOP_TOKENS:
                raise InputError(f"eos_token_ids: {len(ids)} ids; give at most {MAX_STOP_TOKENS}")
            settings: dict[str, Any] = {"sampling": params.of_row(), "key": np.asarray(jax.random.key_data(own))}
        settings["stop_token_ids"] = np.pad(ids, (0, MAX_STOP_TOKENS - len(ids)), constant_values=-1)
        settings["min_length"] = np.int32(prompt + int(checked.min_new_tokens[0]))
        if self.max_prediction:
            settings["prediction"] = np.zeros(self.sizes.capacity, np.int32)
            settings["prediction"][: len(expected)] = expected
            settings["predicted"] = np.int32(len(expected))
        return settings


def _check_sizes(rows: int, groups: int, page: int, chunk: int, capacity: int, positions: int, steps: int) -> None:
    """Refuse what is out of range."""
    if rows < 1 or rows % groups:
        raise InputError(f"rows={rows}: must be at least 1, and a multiple of the mesh's data axis ({groups})")
    if page < 8 or page & (page - 1):
        raise InputError(f"page={page}: must be a power of two, at least 8")
    if chunk < 1 or chunk % page:
        raise InputError(f"chunk={chunk}: must be a multiple of page={page}")
    if not 2 <= capacity <= positions:
        raise InputError(f"capacity={capacity}: must be from 2 to {positions}, the positions of target and drafter")
    if not 1 <= steps <= ROOM:
        raise InputError(f"steps={steps}: must be from 1 to {ROOM}, which is what a drafter catches up with at once")


def _shapes(drafter: Drafter | None, drafts: Sequence[DraftShape | int | str | None] | None) -> tuple[DraftShape | None, ...]:
    """The drafts to choose from, each once."""
    if drafts is None:
        if drafter is None:
            return (None,)
        own = drafter.draft_shape
        drafts = (None, Chain(min(own.depth, 3)), own)
    if isinstance(drafts, str) or not drafts:
        raise InputError(f"drafts={drafts!r}: give a sequence of shapes, such as (None, 'chain:3')")
    shapes = tuple(dict.fromkeys(None if draft is None else as_shape(draft) for draft in drafts))
    if drafter is None and shapes != (None,):
        raise InputError(f"drafts={drafts!r}: there is no drafter; give one")
    return shapes


def _widths(rows: int, widths: Sequence[int] | None, by_default: bool) -> tuple[int, ...]:
    if widths is None:
        widths = [1 << power for power in range(rows.bit_length()) if 1 << power < rows] if by_default else []
        return (*widths, rows)
    if not by_default and tuple(widths) != (rows,):
        raise InputError(f"widths={widths}: on a mesh that splits rows, give ({rows},)")
    if not widths or max(widths) != rows or min(widths) < 1:
        raise InputError(f"widths={widths}: numbers of rows from 1 to rows={rows}, {rows} among them")
    return tuple(sorted(set(widths)))


def _with_draft(target: Target, drafter: Drafter, shape: DraftShape | None, may_pause: bool) -> Drafter:
    """``drafter`` with another draft, or paused, checked against ``target``."""
    if isinstance(drafter, NoDraft):
        return drafter
    made = drafter if shape is None else replace(drafter, draft=shape)  # pyright: ignore[reportArgumentType]
    if shape is not None:
        shape.check(target.config.vocab_size)
    made.check(target)
    return Pausable(made, paused=shape is None) if may_pause else made


def _drafters(
    target: Target, drafter: Drafter, shapes: Sequence[DraftShape | None], longest: int
) -> tuple[tuple[DraftShape | Copies | None, ...], list[Drafter]]:
    """What there is to choose from, and a drafter for each; all of them have one state. With ``longest``, one that copies
    from predictions is the last."""
    made = [_with_draft(target, drafter, shape, may_pause=None in shapes) for shape in shapes]
    if not longest:
        return tuple(shapes), made
    beside = next((index for index, shape in enumerate(shapes) if isinstance(shape, Chain)), None)
    if isinstance(drafter, NoDraft):
        other = drafter
    elif beside is not None:
        other = made[beside]
    else:  # trees alone: beside copies go chains
        other = _with_draft(target, drafter, Chain(min(drafter.draft_shape.depth, 3)), may_pause=None in shapes)
    copying = WithPrediction(other, longest=longest)
    copying.draft_shape.check(target.config.vocab_size)
    wrapped: list[Drafter] = [WithPrediction(each, longest=0) for each in made]
    return (*shapes, Copies(longest, beside)), [*wrapped, copying]
