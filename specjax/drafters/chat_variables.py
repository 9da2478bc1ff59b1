"""The variables of the chat template that a drafter was trained with.

They stand in a file beside the drafter's weights. A drafter that was trained on chats without
thinking drafts thoughts poorly, so whoever uses it with chats of other variables is warned.
"""

import json
from pathlib import Path
from typing import Any

from specjax.files import write_text
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, show
from specjax.progress import say
from specjax.templates import Settings, have_same_effect, settings_of, shown_settings

FILE = "trained_with.json"
_FIELD = "chat_template_kwargs"


def write(directory: Path, chat_template_kwargs: Settings) -> None:
    """Write the variables that a drafter was trained with beside its weights.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.drafters import chat_variables
        >>> from specjax.models import hub
        >>> Path("drafter").mkdir()
        >>> chat_variables.write(Path("drafter"), {"enable_thinking": False})
        >>> chat_variables.read(hub.open_checkpoint("drafter"))
        {'enable_thinking': False}
    """
    content = {_FIELD: dict(chat_template_kwargs)}
    write_text(directory / FILE, json.dumps(content, indent=2, default=str) + "\n")


def read(files: CheckpointFiles) -> dict[str, Any] | None:
    """Return the variables that a drafter was trained with; None if they are not recorded.

    Raises:
        CheckpointError: the file is damaged.
    """
    settings = files.json(FILE, {}).get(_FIELD)
    if settings is not None and not isinstance(settings, dict):
        raise CheckpointError(
            f"{files.directory / FILE}: {_FIELD}={show(settings)}: must be an object: correct it,"
            " or remove the file"
        )
    return settings


def copy(files: CheckpointFiles, directory: Path) -> None:
    """Copy the file of a checkpoint to another directory, if there is one."""
    if (files.directory / FILE).is_file():
        write_text(directory / FILE, (files.directory / FILE).read_text(encoding="utf-8"))


def compare(name: str, files: CheckpointFiles, tokenizer: Any, argument: str = _FIELD) -> None:
    """Warn if a drafter was trained with other variables than those of a tokenizer's chats.

    There is no warning if the variables are not recorded, or if both make the same of a chat.

    Args:
        name: the drafter, as the warning names it: ``drafter='runs/best'``.
        files: the files of the drafter.
        tokenizer: the tokenizer, with its chat template and its variables.
        argument: the name of the argument with the tokenizer's variables.
    """
    trained, used = read(files), settings_of(tokenizer)
    if trained is None or not tokenizer.chat_template:
        return
    if not have_same_effect(tokenizer, trained, used):
        say(
            f"{name}: it was trained on chats with {_FIELD}={shown_settings(trained)}, and chats"
            f" have {argument}={shown_settings(used)} here: it drafts them less well; give the same"
            " variables",
            unasked=True,
        )
