"""What other libraries say on the way, and no command passes on to its user.

transformers reads a checkpoint's tokenizer, and remarks on the configuration beside it as if it were to run the model. specjax
reads that configuration itself, and refuses by name what it cannot follow. All else is let through: for instance, that a
tokenizer splits text in a wrong way. A program that uses the library hears all but that there is no PyTorch (specjax/text.py).
"""

import logging
import warnings
from dataclasses import dataclass

REMARKS = {
    # A configuration is read as that of another class, or has its rotary embedding written in the older way.
    "transformers.configuration_utils": ("You are using a model of type", "got `key=rope_scaling` in kwargs"),
    "transformers.modeling_rope_utils": ("Unrecognized keys in `rope_parameters`",),
    # specjax says itself when a prompt is too long for the model.
    "transformers.tokenization_utils_base": ("Token indices sequence length is longer than",),
}
"""By logger, what the remarks hold that are left out."""


def silence() -> None:
    """Leave out, in this process and from now on, the `REMARKS` and a warning about ``rope_scaling`` in a configuration."""
    for name, remarks in REMARKS.items():
        logging.getLogger(name).addFilter(_Filter(remarks))
    warnings.filterwarnings("ignore", message="`rope_scaling` is deprecated", category=FutureWarning)


@dataclass(frozen=True)
class _Filter:
    """Drop the records that hold one of the remarks. A logger takes an equal filter once."""

    remarks: tuple[str, ...]

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(remark in message for remark in self.remarks)
