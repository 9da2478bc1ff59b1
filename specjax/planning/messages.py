"""The size of messages between a drafter and a remote target (arXiv 2410.03804, table 7).

The drafter sends its draft: the token and the parent of each node. The target returns the accepted
tokens, and the data that the drafter reads of each token:

- a draft model reads nothing else;
- EAGLE reads a hidden state;
- EAGLE-3 reads the output of its first matrix, which runs beside the target and joins three states;
- Mixture of Attentions reads the output of layer self-attention if that runs beside the target,
  otherwise the keys and values of all layers. Target layer inference also needs the keys and values
  of the layers that it runs.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from specjax.errors import InputError
from specjax.models.config import ModelConfig

TOKEN_BYTES, PARENT_BYTES = 4, 2

Reader = Literal[
    "draft model", "eagle", "eagle3", "moa", "moa, layers on the client", "moa, no layers"
]
"""The kinds of drafters.

For Mixture of Attentions, layer self-attention runs beside the target, on the client, or not at
all.
"""


@dataclass(frozen=True)
class Messages:
    """The bytes of the messages of one round.

    Attributes:
        up: the bytes of the draft.
        down: the bytes of the accepted tokens and their data.

    Examples:
        >>> from specjax.planning.messages import Messages
        >>> Messages(up=24, down=20).up
        24
    """

    up: int
    down: int


def message_sizes(
    reader: Reader,
    target: ModelConfig,
    *,
    nodes: int,
    accepted: int,
    tli: int = 0,
    number_bytes: int = 2,
) -> Messages:
    """Return the bytes of the messages of one round.

    Args:
        reader: the kind of drafter.
        target: the config of the target.
        nodes: the number of drafted tokens, without the root.
        accepted: the number of tokens that the round adds, with the bonus token.
        tli: the number of the target's last layers that the drafter runs itself.
        number_bytes: the bytes of one number of a state: 2 for float16 and bfloat16.

    Raises:
        InputError: A number is out of range, or the target's layers do not have the keys and values
            that this kind of drafter reads.

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
            f"nodes={nodes}, accepted={accepted}, tli={tli}, number_bytes={number_bytes}: nodes"
            " must be at least 0, accepted and number_bytes at least 1, tli from 0 to"
            f" {target.num_layers - 1}"
        )
    if target.mla is not None and (reader.startswith("moa") or tli):
        raise InputError(
            "target: it caches latents (MLA), and has no keys and values that could be sent; give"
            " another target"
        )
    sent = range(
        0 if reader.startswith("moa") and reader != "moa, no layers" else target.num_layers - tli,
        target.num_layers,
    )
    if states := set(target.layers_with_states) & set(sent):
        raise InputError(
            f"target: its layers {sorted(states)} keep a state, which is not sent; give a target"
            " whose layers have entries alone, or a reader of other layers"
        )
    if tli and not reader.startswith("moa"):
        raise InputError(f"tli={tli}: a drafter of kind {reader!r} runs no layers of the target")
    layers = [target.entry_size(layer) for layer in range(target.num_layers)]
    if reader in ("moa", "moa, layers on the client") and len(set(layers)) > 1:
        raise InputError(
            f"target: its layers cache {sorted(set(layers))} numbers of a token, but layer"
            " self-attention needs layers of the same size; give such a target"
        )
    numbers = {
        "draft model": 0,
        "eagle": target.hidden_size,
        "eagle3": target.hidden_size,
        "moa, no layers": target.hidden_size,
        "moa": layers[0],
        "moa, layers on the client": sum(layers),
    }[reader]
    # If layer self-attention runs on the client, it has received the KV of all layers already.
    extra = 0 if reader == "moa, layers on the client" else sum(layers[target.num_layers - tli :])
    return Messages(
        up=nodes * (TOKEN_BYTES + PARENT_BYTES),
        down=accepted * (TOKEN_BYTES + (numbers + extra) * number_bytes),
    )
