"""The models, drafts and sizes of an engine, checked before anything is compiled."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from specjax import decoding, pipeline, processes, sharding
from specjax.decoding.options import as_key
from specjax.drafters import Drafter, NoDraft
from specjax.drafters.pausable import ROOM, Pausable
from specjax.drafters.with_prediction import WithPrediction
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import Chain, DraftShape, UnionTree
from specjax.drafts.speculation import NO_LIMIT, DraftLimit, Stated
from specjax.errors import InputError
from specjax.grammars import GrammarCompiler, ThoughtTokens
from specjax.grammars.thoughts import check_texts
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.choice import Copies
from specjax.serving.device import MAX_STOP_TOKENS, ClientDrafts, EngineDevice, Sizes
from specjax.serving.earlier_answers import (
    NO_SEGMENT,
    EarlierAnswers,
    check_answers,
    check_capacity,
)
from specjax.serving.memory import USUAL_CAPACITY, usual_chunk, usual_page
from specjax.thoughts import thought_tokens as thought_tokens_of

USUAL_TEXT = 1024
"""The tokens per row that the KV cache has pages for, unless the number of pages is stated."""


# Compiled, because every request folds its index into a key: one device call in place of many small
# ones.
_fold_in = jax.jit(jax.random.fold_in)


@dataclass(frozen=True)
class EngineConfig:
    """The models, drafts and sizes of an engine. They are equal in all of its processes.

    Attributes:
        target: the target.
        tokenizer: the target's tokenizer; None: prompts are token ids.
        choices: the drafts to choose from.
        drafters: one drafter for each of ``choices``.
        sizes: the sizes that programs are compiled for.
        clients: the shapes of drafts that clients may send; None: there are no clients.
        max_prediction: the largest number of tokens that are copied from a prediction per step.
        default_sampling: the sampling of requests that state none; None: greedy.
        default_speculation: how far requests speculate that do not state it; None: without a limit.
        grammars: the compiler of requests' grammars; None: no request may have one.
        penalties: whether requests may have penalties, biases and banned words.
        thought_texts: the two texts that begin and end a thought; None: the tokenizer states them.
        earlier_answers: the number of tokens of earlier answers that are kept for each tenant.
    """

    target: Target
    tokenizer: Any
    choices: tuple[DraftShape | Copies | None, ...]
    drafters: list[Drafter]
    sizes: Sizes
    clients: ClientDrafts | None
    max_prediction: int
    default_sampling: Sampling | None
    default_speculation: Stated
    grammars: GrammarCompiler | None = None
    penalties: bool = False
    thought_texts: tuple[str, str] | None = None
    earlier_answers: int = 0

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
        grammars: bool = False,
        penalties: bool | None = None,
        thought_tokens: Sequence[str] | None = None,
        earlier_answers: int = 0,
    ) -> "EngineConfig":
        """Check the arguments of `Engine`, and build its configuration.

        Raises:
            InputError: An argument cannot be used. The message names it, its value and a remedy.
        """
        default_sampling, default_speculation, generator = None, None, None
        if isinstance(target, pipeline.TextGenerator):
            generator = target
            if drafter is not None:
                raise InputError(
                    "drafter: the generator brings its own drafter; give this one to specjax.load"
                )
            default_sampling = target.default_sampling
            default_speculation = target.speculation
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
        penalties = _penalties(target, default_sampling, penalties)
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
        check_capacity(earlier_answers, rows)
        check_answers(earlier_answers, drafter)
        choices, drafters = _drafters(target, drafter, shapes, max_prediction)
        sizes = Sizes(rows, widths, capacity, pages, page, chunk, steps, max_logprobs)
        config = cls(
            target,
            tokenizer,
            choices,
            drafters,
            sizes,
            clients,
            max_prediction,
            default_sampling,
            default_speculation,
            _grammar_compiler(target, tokenizer, generator) if grammars else None,
            penalties,
            _thought_texts(thought_tokens, tokenizer, target, has_grammars=grammars),
            earlier_answers,
        )
        config.speculation(None)  # the default must be one that requests may state
        return config

    @property
    def drafts(self) -> tuple[DraftShape | None, ...]:
        """The drafts that a request may name; None is plain decoding."""
        return tuple(draft for draft in self.choices if not isinstance(draft, Copies))

    def speculation(self, stated: Stated) -> DraftLimit:
        """Return how far a request speculates; None is the default.

        Raises:
            InputError: It is not supported, or a draft that the engine does not have.
        """
        return DraftLimit.of(self.default_speculation if stated is None else stated, self.drafts)

    @cached_property
    def thought(self) -> ThoughtTokens:
        """The tokens that begin and end a thought.

        Raises:
            InputError: The engine has no masked steps, or the tokenizer does not state them.
        """
        if self.grammars is None:
            raise InputError(
                "thinking_budget: this engine does not support it; give Engine(grammars=True)"
                " (--grammars on)"
            )
        thought = thought_tokens_of(self.tokenizer, self.thought_texts)
        thought.check(self.target.config.vocab_size)
        return thought

    def together(self) -> processes.Processes | None:
        """Return the processes whose devices hold the target; None: only this process does.

        Raises:
            InputError: The mesh spans processes, and this process has not joined them.
        """
        if not sharding.spans_processes(self.target.mesh):
            return None
        if (together := processes.joined()) is None:
            raise InputError(
                "target: its mesh spans several processes: call specjax.processes.join() at the"
                " beginning of each"
            )
        return together

    def device(self, together: processes.Processes | None) -> EngineDevice:
        """Return a device whose rows are free. That of the first of several processes leads."""
        has_grammars = self.grammars is not None
        if together is not None and together.is_first:
            return over_hosts.LeadingDevice(
                self.target,
                self.drafters,
                self.sizes,
                self.clients,
                has_grammars,
                self.earlier_answers,
                processes=together,
            )
        return EngineDevice(
            self.target,
            self.drafters,
            self.sizes,
            self.clients,
            has_grammars,
            self.penalties,
            self.earlier_answers,
        )

    def answers(self, together: processes.Processes | None) -> EarlierAnswers | None:
        """Return a store of earlier answers; None: none are kept.

        The first of several processes has it, and the others repeat its sorting.
        """
        if not self.earlier_answers:
            return None
        if together is None:
            return EarlierAnswers(self.earlier_answers)
        return over_hosts.LeadingAnswers(self.earlier_answers, together)

    def placeholder_settings(self) -> dict[str, Any]:
        """Return the settings of a text without stop tokens, for the warm-up."""
        return self.settings(SamplingParams(max_new_tokens=1, eos_token_ids=()), prompt=2)

    def settings(
        self,
        params: SamplingParams,
        prompt: int,
        *,
        choice: int = 0,
        key: jax.Array | None = None,
        expected: Sequence[int] = (),
        draft_limit: int = NO_LIMIT,
    ) -> dict[str, Any]:
        """Return the settings of a text as `device_rows.Text` stores them.

        Their shapes and types are the same for all texts, so that nothing is compiled again.

        Args:
            params: the request's sampling parameters.
            prompt: the number of tokens of the prompt.
            choice: the index of the text among several of one request.
            key: the random key, in place of the one made from the seed and ``choice``.
            expected: the token ids of a prediction.
            draft_limit: the largest depth of the text's drafts.

        Raises:
            InputError: An argument cannot be used. The message names it, its value and a remedy.
        """
        if not 0 <= (choice := operator.index(choice)) < 2**32:
            raise InputError(f"choice={choice}: must be a whole number, at least 0 and below 2**32")
        # The host computes the key, so that a request never waits for the decode call that the
        # device is at.
        with sharding.on_host():
            row_key = _fold_in(params.make_key(), np.uint32(choice)) if key is None else as_key(key)
            if row_key.ndim:
                raise InputError(f"key has shape {row_key.shape}: give one key")
            checked = params.options().check(self.target.config, 1)
            ids = checked.stop_token_ids[0]
            if len(ids) > MAX_STOP_TOKENS:
                raise InputError(f"eos_token_ids: {len(ids)} ids; give at most {MAX_STOP_TOKENS}")
            settings: dict[str, Any] = {
                "sampling": params.of_row(),
                "key": np.asarray(jax.random.key_data(row_key)),
            }
        settings["stop_token_ids"] = np.pad(
            ids, (0, MAX_STOP_TOKENS - len(ids)), constant_values=-1
        )
        settings["min_length"] = np.int32(prompt + int(checked.min_new_tokens[0]))
        settings["draft_limit"] = np.int32(draft_limit)
        if self.earlier_answers:
            settings["segment"] = np.int32(NO_SEGMENT)
        if self.max_prediction:
            settings["prediction"] = np.zeros(self.sizes.capacity, np.int32)
            settings["prediction"][: len(expected)] = expected
            settings["predicted"] = np.int32(len(expected))
        return settings


def _grammar_compiler(
    target: Target, tokenizer: Any, generator: pipeline.TextGenerator | None
) -> GrammarCompiler:
    """Return the compiler of requests' grammars: that of the generator, if there is one.

    Raises:
        InputError: There is no tokenizer, or it is not supported.
    """
    if tokenizer is None:
        raise InputError("grammars: they need the target's tokenizer; give tokenizer=...")
    if generator is not None:
        return generator.grammar_compiler
    return GrammarCompiler(tokenizer, target.config.vocab_size)


def _thought_texts(
    stated: Sequence[str] | None, tokenizer: Any, target: Target, *, has_grammars: bool
) -> tuple[str, str] | None:
    """Return the stated texts that begin and end a thought, checked; None if none are stated.

    Raises:
        InputError: They are not two texts with tokens, or the engine could not use them.
    """
    if stated is None:
        return None
    begin, end = check_texts(stated)
    if not has_grammars:
        raise InputError(
            f"thought_tokens={stated!r}: they are for thinking budgets, which need"
            " Engine(grammars=True)"
        )
    thought_tokens_of(tokenizer, (begin, end)).check(target.config.vocab_size)
    return begin, end


def _penalties(target: Target, defaults: Sampling | None, stated: bool | None) -> bool:
    """Return whether requests may have penalties; by default, if those of the checkpoint do.

    Raises:
        InputError: The checkpoint's own parameters have one and requests may have none, or the mesh
            does not support them.
    """
    has_own = defaults is not None and defaults.has_penalties
    if (stated or has_own) and sharding.spans_processes(target.mesh):
        advice = (
            "load it with generation_config=None (--generation-config none)"
            if has_own
            else "give penalties=False"
        )
        raise InputError(
            f"penalties: they are not supported on a mesh that spans processes; {advice}"
        )
    if stated is False and has_own:
        raise InputError(
            f"penalties=False: the checkpoint's own parameters are {defaults}; give penalties=True"
            " (--penalties on), or load it with generation_config=None (--generation-config none)"
        )
    return has_own if stated is None else stated


def _check_sizes(
    rows: int, groups: int, page: int, chunk: int, capacity: int, positions: int, steps: int
) -> None:
    """Raise InputError if a size is out of range."""
    if rows < 1 or rows % groups:
        raise InputError(
            f"rows={rows}: must be at least 1, and a multiple of the mesh's data axis ({groups})"
        )
    if page < 8 or page & (page - 1):
        raise InputError(f"page={page}: must be a power of two, at least 8")
    if chunk < 1 or chunk % page:
        raise InputError(f"chunk={chunk}: must be a multiple of page={page}")
    if not 2 <= capacity <= positions:
        raise InputError(
            f"capacity={capacity}: must be from 2 to {positions}, the positions of target and"
            " drafter"
        )
    if not 1 <= steps <= ROOM:
        raise InputError(
            f"steps={steps}: must be from 1 to {ROOM}, the most steps that a paused drafter catches"
            " up with"
        )


def _shapes(
    drafter: Drafter | None, drafts: Sequence[DraftShape | int | str | None] | None
) -> tuple[DraftShape | None, ...]:
    """Return the drafts to choose from, without duplicates."""
    if drafts is None:
        if drafter is None:
            return (None,)
        default = drafter.draft_shape
        drafts = (None, Chain(min(default.depth, 3)), default)
        if isinstance(default, UnionTree):
            drafts = (*drafts, *default.splits)
    if isinstance(drafts, str) or not drafts:
        raise InputError(f"drafts={drafts!r}: give a sequence of shapes, such as (None, 'chain:3')")
    shapes = tuple(dict.fromkeys(None if draft is None else as_shape(draft) for draft in drafts))
    if drafter is None and shapes != (None,):
        raise InputError(f"drafts={drafts!r}: this engine has no drafter; give drafter=...")
    return shapes


def _widths(rows: int, widths: Sequence[int] | None, by_default: bool) -> tuple[int, ...]:
    if widths is None:
        if by_default:
            widths = [1 << power for power in range(rows.bit_length()) if 1 << power < rows]
        else:
            widths = []
        return (*widths, rows)
    if not by_default and tuple(widths) != (rows,):
        raise InputError(f"widths={widths}: on a mesh that splits rows, give ({rows},)")
    if not widths or max(widths) != rows or min(widths) < 1:
        raise InputError(f"widths={widths}: give numbers from 1 to rows={rows}, including {rows}")
    return tuple(sorted(set(widths)))


def _with_draft(
    target: Target, drafter: Drafter, shape: DraftShape | None, may_pause: bool
) -> Drafter:
    """Return ``drafter`` with the draft ``shape``, or paused if it is None, after a check."""
    if isinstance(drafter, NoDraft):
        return drafter
    with_shape = drafter if shape is None else replace(drafter, draft=shape)  # pyright: ignore[reportArgumentType]
    if shape is not None:
        shape.check(target.config.vocab_size)
    with_shape.check(target)
    return Pausable(with_shape, paused=shape is None) if may_pause else with_shape


def _drafters(
    target: Target, drafter: Drafter, shapes: Sequence[DraftShape | None], longest: int
) -> tuple[tuple[DraftShape | Copies | None, ...], list[Drafter]]:
    """Return the drafts to choose from, and one drafter for each. All drafters share one state.

    If ``longest`` is not 0, the last drafter is the one that copies from predictions.
    """
    drafters = [_with_draft(target, drafter, shape, may_pause=None in shapes) for shape in shapes]
    if not longest:
        return tuple(shapes), drafters
    beside = next((index for index, shape in enumerate(shapes) if isinstance(shape, Chain)), None)
    if isinstance(drafter, NoDraft):
        fallback = drafter
    elif beside is not None:
        fallback = drafters[beside]
    else:  # a copy is a chain, so the rows without a prediction draft a chain in the same call
        fallback = _with_draft(
            target, drafter, Chain(min(drafter.draft_shape.depth, 3)), may_pause=None in shapes
        )
    copying = WithPrediction(fallback, longest=longest)
    copying.draft_shape.check(target.config.vocab_size)
    # All drafters are wrapped, because a row's state must fit each of them.
    wrapped: list[Drafter] = [WithPrediction(original, longest=0) for original in drafters]
    return (*shapes, Copies(longest, beside)), [*wrapped, copying]
