"""``specjax regenerate``: the answers of a data set, or the rest of its texts, written anew by the target itself.

A drafter has to guess what the target says, not what somebody else said. So it learns more from the target's own words.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

from specjax import pipeline
from specjax.config import differences, dump_yaml, load_yaml
from specjax.errors import InputError
from specjax.sharding import make_mesh
from specjax.training import chat
from specjax.training.documents import Document, Message, read_documents


@dataclass(frozen=True)
class RegenerateConfig:
    """Write a data set anew: every answer of its conversations, turn by turn, or what follows the beginning of its texts.

    The same command continues a run that was interrupted; its options are kept beside the output. What is written depends on
    the batch size no more than rounding does.

    Attributes:
        target: directory or hub id of the model that writes.
        source: what to write anew, as ``data.source`` of a training: JSONL, Parquet, a directory, ``hf:OWNER/NAME``.
        output: a .jsonl file; a line a document, in the order of the source.
        drafter: makes it faster, and changes nothing in its distribution; "none" is plain decoding.
        draft: shape of its drafts.
        prompt_tokens: of a text, how many tokens are kept as its beginning.
        copies: how often each document is written, with other random numbers.
        limit: most documents to read; 0 is all.
        batch: rows at a time.
        max_new_tokens: of an answer, or of a text.
        temperature: 0 is greedy.
        top_p: in (0, 1].
        seed: of the random draws.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        mesh: devices by axis, data and model.
    """

    target: str = "embedded"
    source: str = ""
    output: str = ""
    drafter: str = "none"
    draft: str = ""
    prompt_tokens: int = 16
    copies: int = 1
    limit: int = 0
    batch: int = 16
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    chat_template: str = ""
    mesh: tuple[int, int] = (1, 1)


def run_regenerate(config: RegenerateConfig) -> None:
    """``specjax regenerate``."""
    for name in ("batch", "copies", "prompt_tokens", "max_new_tokens"):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    if not config.source or not config.output.endswith(".jsonl"):
        raise InputError(f"source={config.source!r}, output={config.output!r}: give a data set, and a file that ends in .jsonl")
    if config.limit < 0:
        raise InputError(f"limit={config.limit}: must be at least 0, which is all")
    if jax.process_count() > 1:
        raise InputError("regenerate runs in one process: unset JAX_COORDINATOR_ADDRESS")
    documents = _usable(read_documents(config.source)[: config.limit or None])
    wanted = [(document, copy) for document in documents for copy in range(config.copies)]
    output = Path(config.output)
    _claim(output, config)
    done = _written(output)
    mesh = None if config.mesh == (1, 1) else make_mesh(*config.mesh)
    drafter = None if config.drafter == "none" else config.drafter
    generator = pipeline.load(config.target, drafter=drafter, draft=config.draft or None, mesh=mesh)
    chat.with_template(generator.tokenizer, config.chat_template)
    writer = _Writer(generator, config)
    with output.open("a", encoding="utf-8") as file:
        starts = range(done, len(wanted), config.batch)
        for start in track(starts, description=f"{output.name} from document {done}"):
            part = wanted[start : start + config.batch]
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in writer.write(part)]
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
    print(f"{len(wanted)} documents in {output}")


def _usable(documents: list[Document]) -> list[Document]:
    """The documents that can be written anew; says how many cannot."""
    chats = [document.messages is not None for document in documents]
    if any(chats) and not all(chats):
        raise InputError("source: holds texts and conversations; give one kind")
    usable = [document for document in documents if document.messages is None or _turns(document)]
    if len(usable) < len(documents):
        print(f"left out, as nothing was asked before an answer: {len(documents) - len(usable)} of {len(documents)}")
    if not usable:
        raise InputError("source: holds no document that can be written anew")
    return usable


def _claim(output: Path, config: RegenerateConfig) -> None:
    """See that ``output`` is new, or was begun with the same options; they are kept beside it."""
    beside = output.with_suffix(".yaml")
    if beside.exists():
        earlier = replace(load_yaml(RegenerateConfig, beside), output=config.output, batch=config.batch)
        if changed := differences(earlier, config):
            raise InputError(
                f"output={config.output!r} was begun with other options ({'; '.join(changed)}): choose another file"
            )
    elif output.exists():
        raise InputError(
            f"output={config.output!r} is there, and {beside.name}, which would say what it is, is not: choose another file"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(dump_yaml(config))


def _written(output: Path) -> int:
    """How many lines of ``output`` are whole. What an interrupted run left of a line is cut off."""
    if not output.exists():
        return 0
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(output, len(whole))
    return whole.count(b"\n")


class _Writer:
    """Writes documents, a batch at a time."""

    def __init__(self, generator: pipeline.TextGenerator, config: RegenerateConfig) -> None:
        self._generator, self._config = generator, config
        self._root = pipeline.make_key(config.seed)

    def write(self, part: Sequence[tuple[Document, int]]) -> list[dict[str, Any]]:
        """The record of each document and copy."""
        keys = [jax.random.fold_in(jax.random.fold_in(self._root, zlib.crc32(d.name.encode())), copy) for d, copy in part]
        if part[0][0].messages is None:
            encode = self._generator.encode
            prompts = [encode(document.text or " ")[: self._config.prompt_tokens] for document, _ in part]
            decode = self._generator.tokenizer.decode  # both together: a character may lie on either side of the cut
            answers = self._answer(prompts, keys)
            return [
                {"text": decode([*prompt, *answer.tokens], skip_special_tokens=True)}
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        chats: list[list[Message]] = [[] for _ in part]
        turns = [_turns(document) for document, _ in part]
        for number in range(max(map(len, turns))):
            rows = [row for row, of_row in enumerate(turns) if number < len(of_row)]
            for row in rows:
                chats[row] += turns[row][number]
            prompts = [self._generator.encode(chats[row]) for row in rows]
            answers = self._answer(prompts, [jax.random.fold_in(keys[row], number) for row in rows])
            for row, answer in zip(rows, answers, strict=True):
                chats[row].append({"role": "assistant", "content": answer.text})
        return [{"messages": messages} for messages in chats]

    def _answer(self, prompts: Sequence[list[int]], keys: Sequence[jax.Array]) -> list[pipeline.Generation]:
        config = self._config
        missing = config.batch - len(prompts)  # the same number of rows each time: one program
        options = pipeline.settings(
            max_new_tokens=[config.max_new_tokens] * len(prompts) + [1] * missing,
            temperature=config.temperature,
            top_p=config.top_p,
            key=jnp.stack([*keys, *[keys[0]] * missing]),
        )
        run = self._generator.start([*prompts, *[prompts[0]] * missing], options)
        for _ in run:
            pass
        return run.generations[: len(prompts)]


def _turns(document: Document) -> list[list[Message]]:
    """What is said before each of the assistant's answers, since the answer before. Empty where an answer has no question."""
    turns: list[list[Message]] = []
    current: list[Message] = []
    for message in document.messages or ():
        if message["role"] == "assistant":
            turns, current = [*turns, current], []
        else:
            current = [*current, message]
    if current:  # a question that nobody has answered yet
        turns.append(current)
    return turns if all(turns) else []
