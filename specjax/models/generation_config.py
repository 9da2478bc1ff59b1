"""The sampling parameters in generation_config.json, for calls that give none.

The fields are read as in transformers 5:

- temperature, top_k, top_p, min_p and repetition_penalty apply only with ``do_sample: true``. If it
  is false, null or absent, they are not even checked.
- ``do_sample: true`` without a temperature is temperature 1; a temperature of 0 is greedy.
- null is as if the field were absent. A top_k of 0 or -1 is no limit.

Only the file counts. transformers itself samples from the 50 likeliest tokens if neither file nor
call has a top_k; here, as in vLLM, that is no limit. vLLM differs in another point: it reads the
five fields and max_new_tokens for any do_sample. Lengths, such as
max_new_tokens, are never read here: the call gives them.

The end-of-sequence ids of the same file always apply; `specjax.models.config_json.read_config`
reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    check_fields,
    flag,
    number,
    read_json,
    show,
)
from specjax.sampling import Sampling

FILE = "generation_config.json"
"""The file's name in a checkpoint."""

_MOST = 2**31 - 1

_SAMPLING: Mapping[str, Field] = {
    "temperature": number(0, float(np.finfo(np.float32).max), default=None),
    "top_k": Field(  # 20.0 is allowed
        f"a whole number from -1 to {_MOST:,}; 0 and -1 are no limit",
        lambda value: type(value) in (int, float) and -1 <= value <= _MOST and value == int(value),
        default=None,
    ),
    "top_p": Field(
        "a number above 0 and at most 1; 1 is no limit",
        lambda value: type(value) in (int, float) and 0 < value <= 1,
        default=None,
    ),
    "min_p": number(0, 1, default=None),
    "repetition_penalty": Field(
        "a number from 0.01 to 10; 1 is no penalty",
        lambda value: type(value) in (int, float) and 0.01 <= value <= 10,
        default=None,
    ),
}

# Fields of transformers, and penalties of other servers, that would change a text, with the values
# besides null that change nothing. The fields of the second table only matter if tokens are
# sampled.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ([], {}),
    "constraints": ([],),
    "force_words_ids": ([],),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "watermarking_config": ({},),
}
_NOT_APPLIED_TO_DRAWS: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's own sampling parameters.

    Attributes:
        sampling: the sampling parameters; None if none apply.
        not_applied: the fields that would change a text and are not applied, such as num_beams,
            with their values.

    Examples:
        >>> from specjax.models.generation_config import GenerationDefaults
        >>> GenerationDefaults(specjax.Sampling(temperature=0.6, top_k=20)).sampling.top_k
        20
    """

    sampling: Sampling | None = None
    not_applied: Mapping[str, Any] = field(default_factory=dict)

    def describe_not_applied(self) -> str:
        """Return the fields that are not applied and their values, on one line.

        Examples:
            >>> from specjax.models.generation_config import GenerationDefaults
            >>> GenerationDefaults(
            ...     not_applied={"no_repeat_ngram_size": 2, "num_beams": 4}
            ... ).describe_not_applied()
            'no_repeat_ngram_size 2, num_beams 4'
        """
        return ", ".join(f"{name} {show(value)}" for name, value in self.not_applied.items())


def read_defaults(directory: Path) -> GenerationDefaults:
    """Read the sampling parameters of a checkpoint's generation_config.json, if it exists.

    Args:
        directory: the directory of the checkpoint.

    Raises:
        CheckpointError: The file is damaged, or a field that applies has the wrong type or is out
            of range.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.models.generation_config import read_defaults
        >>> read_defaults(embedded("target"))
        GenerationDefaults(sampling=None, not_applied={})
    """
    path = directory / FILE
    return parse_defaults(read_json(path) if path.exists() else {}, str(path))


def parse_defaults(raw: Fields, source: str = FILE) -> GenerationDefaults:
    """Return the sampling parameters in the fields of a generation_config.json.

    Args:
        raw: the object of the file.
        source: the file, for errors.

    Raises:
        CheckpointError: A field that applies has the wrong type or is out of range.

    Examples:
        >>> from specjax.models.generation_config import parse_defaults
        >>> qwen3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
        >>> parse_defaults(qwen3).sampling
        Sampling(temperature=0.6, top_k=20, top_p=0.95)
        >>> parse_defaults({**qwen3, "do_sample": False}).sampling is None
        True
        >>> parse_defaults({**qwen3, "top_p": 2})
        Traceback (most recent call last):
        specjax.models.fields.CheckpointError: generation_config.json: top_p=2: must be a number ...
    """
    try:
        is_sampled = bool(check_fields(raw, {"do_sample": flag(default=None)}, source)["do_sample"])
        fields = check_fields(raw, _SAMPLING, source) if is_sampled else {}
    except CheckpointError as error:
        remedy = (
            "correct it, or leave the file's sampling parameters out (generation_config=None,"
            " --generation-config none)"
        )
        raise CheckpointError(f"{error}: {remedy}") from None
    neutral = {**_NOT_APPLIED, **_NOT_APPLIED_TO_DRAWS} if is_sampled else _NOT_APPLIED
    not_applied = {
        name: raw[name]
        for name, values in neutral.items()
        if raw.get(name) is not None and raw[name] not in values and name not in fields
    }
    if not is_sampled:
        return GenerationDefaults(None, not_applied)
    stated = {name: value for name, value in fields.items() if value is not None}
    if "top_k" in stated:
        stated["top_k"] = max(0, int(stated["top_k"]))
    return GenerationDefaults(Sampling(**stated), not_applied)
