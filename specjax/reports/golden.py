"""Acceptance lengths in the form of InferenceX's "golden" files, by the length of the draft.

The form is that of the YAML files in ``golden_al_distribution`` of
github.com/SemiAnalysisAI/InferenceX: model, mode of thinking, number of drafted tokens, and the
mean acceptance length with the bonus token, rounded to two decimals.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import yaml

Thinking = Literal["on", "off"]

_PLAIN_KEY = re.compile(r"[A-Za-z][\w.-]*")


def golden_yaml(
    model: str,
    thinking: Thinking | None,
    lengths: Mapping[int, float | None],
    notes: Sequence[str],
) -> str:
    """Return the text of a golden file.

    Args:
        model: the name of the model. The key is its last part, in lower case.
        thinking: whether the model thinks before it answers; None: it cannot be switched.
        lengths: the acceptance length by the number of drafted tokens; None: nothing was drafted.
        notes: lines of comments, which say how the lengths were measured.

    Examples:
        >>> from specjax.reports.golden import golden_yaml
        >>> print(golden_yaml("Qwen/Qwen3-8B", "on", {1: 1.81, 2: 2.3}, ["dataset: coding"]))
        # dataset: coding
        #
        # key = num_speculative_tokens; value = acceptance length
        qwen3-8b:
          thinking_on:
            1: 1.81
            2: 2.30
        <BLANKLINE>
    """
    name = model.rstrip("/").rpartition("/")[2].lower()
    # A quoted key, where YAML would read a name as something else, such as true.
    is_plain = _PLAIN_KEY.fullmatch(name) and yaml.safe_load(name) == name
    key = name if is_plain else json.dumps(name)
    lines = [f"# {line}" for note in notes for line in note.splitlines()]
    lines += ["#", "# key = num_speculative_tokens; value = acceptance length", f"{key}:"]
    values = {
        length: "N/A" if value is None else f"{value:.2f}"
        for length, value in sorted(lengths.items())
    }
    if thinking is None:
        # The form without modes is a list of mappings with one key each.
        lines += [f"  - {{{length}: {value}}}" for length, value in values.items()]
    else:
        lines.append(f"  thinking_{thinking}:")
        lines += [f"    {length}: {value}" for length, value in values.items()]
    return "\n".join([*lines, ""])
