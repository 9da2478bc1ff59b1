"""What a drafter on one machine and its target on another have to say to each other in a round (arXiv 2410.03804, table 7).

The drafter sends its draft up: of every node its token, and which node it hangs below. The target sends down what it kept, and
what the drafter reads of it: nothing but tokens for a model of its own; a hidden state a token for EAGLE, and for EAGLE-3 what
its first matrix, which runs beside the target, makes of three; and for Mixture of Attentions either the mean that layer
self-attention gave, where that runs beside the target, or the keys and values of all layers that it is made from. Target layer
inference also needs the keys and values of the layers that it runs.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from specjax.errors import InputError
from specjax.models.config import ModelConfig

TOKEN_BYTES, PARENT_BYTES = 4, 2

Reader = Literal["draft model", "eagle", "eagle3", "moa", "moa, layers on the client", "moa, no layers"]
"""Who reads what the target sends; of Mixture of Attentions, where its layer self-attention runs, or that it has none."""


@dataclass(frozen=True)
class Messages:
    """Bytes of one round.

    Attributes:
        up: the draft.
        down: what was kept, and what the target knows of it.

    Examples:
        >>> from specjax.planning.messages import Messages
        >>> Messages(up=24, down=20).up
        24
    """

    up: int
    down: int


def message_sizes(
    reader: Reader, target: ModelConfig, *, nodes: int, accepted: int, tli: int = 0, number_bytes: int = 2
) -> Messages:
    """The bytes that a round takes.

    Args:
        reader: what kind of drafter it is.
        target: the target's configuration.
        nodes: drafted tokens, the root not counted: the target knows it.
        accepted: tokens that the round adds, the target's own included.
        tli: the target's last layers that the drafter runs itself.
        number_bytes: of one number of a state: 2 for float16 and bfloat16.

    Raises:
        InputError: a number is out of range, or the target has no keys and values to send, or none that could be summarised.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.messages import message_sizes
        >>> target_config = published("llama-3.1-8b")
        >>> message_sizes("draft model", target_config, nodes=4, accepted=3)
        Messages(up=24, down=12)
        >>> message_sizes("eagle3", target_config, nodes=4, accepted=3)
        Messages(up=24, down=24588)
    """
    if reader not in get_args(Reader):
        raise InputError(f"reader={reader!r}: give one of {', '.join(map(repr, get_args(Reader)))}")
    if nodes < 0 or accepted < 1 or number_bytes < 1 or not 0 <= tli < target.num_layers:
        raise InputError(
            f"nodes={nodes}, accepted={accepted}, tli={tli}, number_bytes={number_bytes}: nodes at least 0, accepted and "
            f"number_bytes at least 1, tli from 0 to {target.num_layers - 1}"
        )
    if target.mla is not None and (reader.startswith("moa") or tli):
        raise InputError("target: remembers latents (MLA), and no keys and values that could be sent")
    sent = range(0 if reader.startswith("moa") and reader != "moa, no layers" else target.num_layers - tli, target.num_layers)
    if states := set(target.linear_layers) & set(sent):
        raise InputError(
            f"target: its layers {sorted(states)} keep a state, and no entries of tokens that could be sent: give a target "
            "without linear attention, or a reader of other layers"
        )
    if tli and not reader.startswith("moa"):
        raise InputError(f"tli={tli}: a drafter of kind {reader!r} runs no layers of the target")
    layers = [target.entry_size(layer) for layer in range(target.num_layers)]
    if reader in ("moa", "moa, layers on the client") and len(set(layers)) > 1:
        raise InputError(
            f"target: its layers remember {sorted(set(layers))} numbers of a token, and layer self-attention reads layers "
            "that are alike: give such a target"
        )
    numbers = {
        "draft model": 0,
        "eagle": target.hidden_size,
        "eagle3": target.hidden_size,
        "moa, no layers": target.hidden_size,
        "moa": layers[0],
        "moa, layers on the client": sum(layers),
    }[reader]
    # On the client all layers are there already.
    extra = 0 if reader == "moa, layers on the client" else sum(layers[target.num_layers - tli :])
    return Messages(
        up=nodes * (TOKEN_BYTES + PARENT_BYTES),
        down=accepted * (TOKEN_BYTES + (numbers + extra) * number_bytes),
    )
