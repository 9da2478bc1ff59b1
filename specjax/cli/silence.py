"""Messages of other libraries that commands do not show to their users.

While transformers reads a checkpoint's tokenizer, it warns about the model's configuration as if it
were to run the model. specjax reads that configuration itself, and refuses fields that it does not
support. All other messages pass, such as a warning that a tokenizer splits text incorrectly.
Programs that use the library see all messages except that PyTorch is missing (specjax/text.py).
"""

import logging
import warnings
from dataclasses import dataclass

REMARKS = {
    # The configuration is read as another class, or has its rotary embedding in the older format.
    "transformers.configuration_utils": (
        "You are using a model of type",
        "got `key=rope_scaling` in kwargs",
    ),
    "transformers.modeling_rope_utils": ("Unrecognized keys in `rope_parameters`",),
    # specjax itself reports prompts that are too long for the model.
    "transformers.tokenization_utils_base": ("Token indices sequence length is longer than",),
}
"""The messages to suppress: parts of their text, by logger."""


def silence() -> None:
    """Suppress the `REMARKS` and a warning about ``rope_scaling``, in this process from now on."""
    for name, remarks in REMARKS.items():
        logging.getLogger(name).addFilter(_Filter(remarks))
    warnings.filterwarnings(
        "ignore", message="`rope_scaling` is deprecated", category=FutureWarning
    )


@dataclass(frozen=True)
class _Filter:
    """A filter for log records that contain one of the remarks.

    A logger adds equal filters only once.
    """

    remarks: tuple[str, ...]

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(remark in message for remark in self.remarks)
