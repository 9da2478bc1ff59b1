"""Bytes of a round between a drafter and a target on two machines (arXiv 2410.03804, table 7).

python -m benchmarks.messages --shape llama-3.1-8b
"""

import sys
from dataclasses import dataclass
from typing import get_args

import tyro
from rich.console import Console
from rich.table import Table

from specjax.errors import InputError
from specjax.models.published import published
from specjax.planning.messages import Messages, Reader, message_sizes


@dataclass(frozen=True)
class MessagesConfig:
    """Compute the bytes of a round.

    Attributes:
        shape: published shape of a target.
        nodes: drafted tokens.
        accepted: tokens that a round adds.
        tli: numbers of the target's last layers that a Mixture of Attentions runs itself.
        number_bytes: bytes of a number of a state.
    """

    shape: str = "llama-3.1-8b"
    nodes: int = 62
    accepted: int = 4
    tli: tuple[int, ...] = (0, 1, 3)
    number_bytes: int = 2


def run(config: MessagesConfig) -> dict[str, Messages]:
    """Return the messages of each kind of drafter."""
    target = published(config.shape)
    messages = {}
    for reader in get_args(Reader):
        for tli in config.tli if reader.startswith("moa") else (0,):
            name = f"{reader}, TLI {tli}" if reader.startswith("moa") else reader
            messages[name] = message_sizes(
                reader,
                target,
                nodes=config.nodes,
                accepted=config.accepted,
                tli=tli,
                number_bytes=config.number_bytes,
            )
    return messages


def main(config: MessagesConfig) -> None:
    """Print the table."""
    title = f"{config.shape}: {config.nodes} nodes up, {config.accepted} tokens down"
    table = Table("drafter", "up, KB", "down, KB", "down a token, KB", title=title)
    for name, messages in run(config).items():
        a_token = messages.down / config.accepted / 1024
        table.add_row(
            name, f"{messages.up / 1024:.2f}", f"{messages.down / 1024:.1f}", f"{a_token:.1f}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(MessagesConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
