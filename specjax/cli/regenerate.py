"""``specjax regenerate``: the answers of a data set, or the rest of its texts, rewritten by the target itself.

A drafter has to guess what the target says, not what somebody else said. So it learns more from the target's own words.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specjax import pipeline
from specjax.cli import shards
from specjax.config import differences, dump_yaml, load_yaml
from specjax.errors import InputError
from specjax.files import FullDiskError, is_full_disk, write_text
from specjax.progress import waiting
from specjax.regeneration import AnswerWriter, positions_of
from specjax.sampling_params import SamplingParams
from specjax.sharding import mesh_for
from specjax.text import check_stop, read_json_lines
from specjax.training import fingerprint
from specjax.training.documents import REGENERATED_FROM, Document, Message, find_origin, identities, read_documents
from specjax.training.written import NOTE


@dataclass(frozen=True)
class RegenerateConfig:
    """Rewrite a data set with the target: every answer of conversations, turn by turn, or what follows the beginnings of texts.

    The same command continues a run that was interrupted, and adds what has come to the source: documents are recognised by
    their content. Its options and fingerprints of the target, its tokenizer and the chat template are kept beside the output.
    The batch size changes what is written no more than rounding does. What leaves no room for an answer is left out (of
    conversations, the turns from there on), and the command says how many.

    A large data set is divided over machines: each process writes the documents of one shard, and needs to know of no other.
    Which documents those are follows from their content, and what is written of a document is the same in shards of any number.

    Attributes:
        target: directory or hub id of the model that writes.
        source: what to rewrite, as ``data.source`` of a training: JSONL, Parquet, a directory, ``hf:OWNER/NAME``.
        output: a .jsonl file; a line a document and copy, with the document's identity (``document``), the number of the copy
            (``copy``), and what both go back to (``regenerated_from``): a training holds out all copies of a document, and all
            that is written after those, or none. So also documents that are equal. With shard a folder, with a file for each.
            A line also has the tokens that the target was given and wrote (``tokens``), and which of them it wrote
            (``loss_spans``): a training with the same tokenizer and chat template takes these, and tokenises nothing again.
        shard: "I/N": write the documents of shard I, from 0, of N. Under a scheduler "auto" or "auto/N": its array of tasks
            (Slurm, Kubernetes) says which one. The file is renamed when it is whole; a whole one is not written again.
        missing: print which of so many shards are not in the folder output, and end with status 1 if any is not.
        drafter: makes it faster, and changes nothing in its distribution; "none" is plain decoding.
        draft: shape of its drafts.
        prompt_tokens: of a text, how many tokens are kept as its beginning.
        copies: how often each document is written, with other random numbers.
        limit: most documents to read; 0 is all.
        batch: texts at a time. When one ends another begins.
        max_new_tokens: of an answer, or of a text.
        temperature: 0 is greedy.
        top_p: in (0, 1].
        seed: of the random draws.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template is given beside the messages, as JSON: '{"enable_thinking": false}'.
        stop: strings before the first of which an answer of a conversation ends, where the model has no token for it.
        mesh: devices by axis, data and model.
    """

    target: str = "embedded"
    source: str = ""
    output: str = ""
    shard: str = ""
    missing: int = 0
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
    chat_template_kwargs: str = ""
    stop: tuple[str, ...] = ()
    mesh: tuple[int, int] = (1, 1)


def run_regenerate(config: RegenerateConfig) -> int:
    """``specjax regenerate``."""
    if config.missing:
        return _say_missing(config)
    _check(config)
    shard, output = None, Path(config.output)
    if config.shard:
        shard = shards.find_shard(config.shard)
        config, output = replace(config, shard=str(shard)), shards.open_shard(output, shard)
    _refuse_foreign(output, config)
    done = _written(output)
    if shard is not None and not shards.is_begun(output):
        print(f"{len(done)} documents in {output}, which is whole")
        return 0
    copies = _copies(config, shard)
    missing = [each for each in copies if each.label not in done]
    mesh = mesh_for(config.mesh)
    drafter = None if config.drafter == "none" else config.drafter
    generator = pipeline.load(
        config.target,
        drafter=drafter,
        draft=config.draft or None,
        mesh=mesh,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=None,
    )
    claim = _claim(config, generator)
    _refuse_other_model(output, config, claim)
    written = 0
    left_out: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    with (
        _answer_writer(generator, config, any(copy.document.messages is not None for copy in copies)) as writer,
        waiting(f"writing {output.name}", len(copies), len(done)) as wait,
    ):
        for part in _write(writer, missing, config):
            written += _append(output, claim, [each.record for each in part if each.record])
            left_out.update(each.left_out for each in part if each.left_out)
            cut.update(each.cut for each in part if each.cut)
            wait.update(done=wait.done + len(part))
    if not written and not done and shard is None:
        reasons = "; ".join(f"{why}: {count} of {len(copies)}" for why, count in left_out.items())
        raise InputError(f"source={config.source!r}: nothing could be written ({reasons})")
    for what, counts in (("left out", left_out), ("cut before a turn", cut)):
        for why, count in counts.items():
            print(f"{what}, as {why}: {count} of {len(copies)}")
    if gone := len(done - {each.label for each in copies}):
        print(f"kept, though no longer in the source: {gone}")
    print(f"{len(done) + written} documents in {output if shard is None else shards.finish(output, claim)}")
    return 0


def _check(config: RegenerateConfig) -> None:
    """Refuse what is wrong before anything is read."""
    for name in ("batch", "copies", "prompt_tokens", "max_new_tokens"):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    if not config.source or not config.output or config.output.endswith(".jsonl") == bool(config.shard):
        kind = "a folder for the shards" if config.shard else "a file that ends in .jsonl"
        raise InputError(f"source={config.source!r}, output={config.output!r}: give a data set, and {kind}")
    if config.limit < 0:
        raise InputError(f"limit={config.limit}: must be at least 0, which is all")
    check_stop(config.stop)


def _say_missing(config: RegenerateConfig) -> int:
    """Print the shards that are missing; the command's exit status."""
    if config.missing < 0 or config.shard or not config.output or config.output.endswith(".jsonl"):
        raise InputError(f"missing={config.missing}: takes the number of all shards and their folder, --output, and no --shard")
    left = shards.missing(Path(config.output), config.missing)
    for shard in left:
        print(shard)
    if not left:
        print(f"all {config.missing} shards are in {config.output}")
    return 1 if left else 0


@dataclass(frozen=True)
class _Copy:
    """One writing of a document.

    Attributes:
        document: what is rewritten.
        identity: which it is, wherever in the source it lies (`identities`).
        number: of the copy, from 0.
    """

    document: Document
    identity: str
    number: int

    @property
    def label(self) -> tuple[str, int]:
        """What its record is known by."""
        return self.identity, self.number

    @property
    def provenance(self) -> dict[str, Any]:
        """What its record says beside its content: its label, and where it belongs when documents are held out."""
        return {REGENERATED_FROM: find_origin(self.document), "document": self.identity, "copy": self.number}


def _copies(config: RegenerateConfig, shard: shards.Shard | None) -> list[_Copy]:
    """What is to be written: all copies of the documents of the source, or of those of a ``shard``."""
    documents = _usable(read_documents(config.source, "source")[: config.limit or None])
    return [
        _Copy(document, identity, copy)
        for document, identity in zip(documents, identities(documents), strict=True)
        if shard is None or shard.holds(identity)
        for copy in range(config.copies)
    ]


def _usable(documents: list[Document]) -> list[Document]:
    """The documents that can be rewritten; says how many cannot."""
    chats = [document.messages is not None for document in documents]
    if any(chats) and not all(chats):
        raise InputError("source: holds texts and conversations; give one kind")
    usable = [document for document in documents if document.messages is None or _turns(document)]
    if len(usable) < len(documents):
        print(f"left out, as nothing was asked before an answer: {len(documents) - len(usable)} of {len(documents)}")
    if not usable:
        raise InputError("source: holds no document that can be rewritten")
    return usable


def _is_begun(output: Path) -> bool:
    """Whether something has been written to ``output``. Until then what is noted beside it binds nobody."""
    return output.exists() and output.stat().st_size > 0


def _refuse_foreign(output: Path, config: RegenerateConfig) -> None:
    """See that ``output`` is new, or was begun with the same options, which are noted beside it in place of no other file."""
    beside = shards.beside(output)
    if not _is_begun(output):
        # A claim that nothing came after, be it cut short, is written again. Any other file is somebody's own.
        if beside.exists() and not NOTE.startswith(beside.read_text(errors="replace")[: len(NOTE)]):
            raise InputError(
                f"output={config.output!r}: {beside.name}, where its options would be kept, is another file: choose another one"
            )
        return
    if not beside.exists():
        raise InputError(
            f"output={config.output!r} is there, and {beside.name}, which would say what it is, is not: choose another file"
        )
    earlier = replace(load_yaml(RegenerateConfig, beside), output=config.output, batch=config.batch)
    if changed := differences(earlier, config):
        raise InputError(f"output={config.output!r} was begun with other options ({'; '.join(changed)}): choose another file")


def _claim(config: RegenerateConfig, generator: pipeline.TextGenerator) -> str:
    """What is noted beside the output: what the target and its tokenizer are, a line of comment each, and the options."""
    return (
        f"{NOTE}{fingerprint.of_target(generator.target)}\n"
        f"# with the tokenizer and the chat template of the fingerprint {fingerprint.of_tokenizer(generator.tokenizer)}\n"
        f"{dump_yaml(config)}"
    )


def _refuse_other_model(output: Path, config: RegenerateConfig, claim: str) -> None:
    """See that what is in ``output`` was written by this very target with this very tokenizer, wherever they lie."""
    if not _is_begun(output):
        return
    noted, found = shards.beside(output).read_text().splitlines(), claim.splitlines()
    what = "the model there, or the data type it is read in,"
    if noted[:1] == found[:1]:
        what = f"its tokenizer, its chat template or the content of chat_template={config.chat_template!r}"
    if noted[:2] != found[:2]:
        raise InputError(
            f"target={config.target!r}: {what} is another than what wrote the beginning of output={config.output!r}: "
            "choose another file, or restore it"
        )


def _written(output: Path) -> set[tuple[str, int]]:
    """The label of each record in ``output``. What an interrupted run left of a line is cut off."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(output, len(whole))
    labels = set()
    for number, record in read_json_lines(output):
        try:
            labels.add((str(record["document"]), int(record["copy"])))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{output}:{number}: says not which document it is of, as in older versions of specjax: choose another file"
            ) from None
    return labels


def _append(output: Path, claim: str, records: Sequence[dict[str, Any]]) -> int:
    """Add ``records``, and say how many they are. The first ones make ``output`` this command's: ``claim`` goes beside it."""
    if not records:
        return 0
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    again = "make room, and give the same command again"
    try:
        if not _is_begun(output):
            write_text(shards.beside(output), claim)
        with output.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # what was written of a line is cut off when the run goes on
        if is_full_disk(error):
            raise FullDiskError(output, len(lines.encode()), again) from None
        raise InputError(f"output={str(output)!r}: cannot be written ({error.strerror}): {again}") from None
    return len(records)


LONGEST = 8192
"""Tokens of the longest conversation that is answered, where the models have positions for more: there is a page for each."""


def _answer_writer(generator: pipeline.TextGenerator, config: RegenerateConfig, has_chats: bool) -> AnswerWriter:
    """Return the writer, with room for the longest prompt that is answered."""
    tokens_per_text = config.max_new_tokens + (LONGEST if has_chats else config.prompt_tokens)
    params = SamplingParams(
        temperature=config.temperature, top_p=config.top_p, seed=config.seed, max_new_tokens=config.max_new_tokens
    )
    capacity = min(positions_of(generator), max(tokens_per_text, 2))
    return AnswerWriter(generator, params, rows=config.batch, capacity=capacity)


@dataclass(frozen=True)
class _Written:
    """What became of a copy.

    Attributes:
        record: to be written; empty where there is none.
        left_out: why there is none.
        cut: why a conversation ended before a turn of its own.
    """

    record: dict[str, Any]
    left_out: str = ""
    cut: str = ""


def _write(writer: AnswerWriter, copies: Sequence[_Copy], config: RegenerateConfig) -> Iterator[list[_Written]]:
    """Yield what became of ``copies``, in their order, ``config.batch`` at a time.

    As many are written at once as the engine has rows, each of which begins when another one ends.
    """
    rows = config.batch
    pool = ThreadPoolExecutor(2 * rows)  # a thread waits for each answer
    ahead: deque[Future[_Written]] = deque()
    part: list[_Written] = []
    try:
        for copy in copies:
            ahead.append(pool.submit(_write_one, writer, copy, config))
            # Texts end in any order and are written in theirs: some more are under way than there are rows.
            if len(ahead) == 4 * rows:
                part.append(ahead.popleft().result())
            if len(part) == rows:
                yield part
                part = []
        part += [future.result() for future in ahead]
        if part:
            yield part
    finally:  # interrupted: the engine cancels what is under way when it is closed
        pool.shutdown(wait=False, cancel_futures=True)


def _write_one(writer: AnswerWriter, copy: _Copy, config: RegenerateConfig) -> _Written:
    """Write one copy of a document."""
    written = _write_text(writer, copy, config) if copy.document.messages is None else _write_chat(writer, copy, config)
    return replace(written, record={**written.record, **copy.provenance}) if written.record else written


def _write_text(writer: AnswerWriter, copy: _Copy, config: RegenerateConfig) -> _Written:
    """Continue the beginning of a text."""
    prompt, why_not = writer.encode(copy.document.text or " ", config.prompt_tokens)
    if why_not:
        return _Written({}, left_out=why_not)
    answer = writer.submit(prompt, writer.key(copy.identity, copy.number)).result()
    return _Written(writer.text_record(prompt, answer))


def _write_chat(writer: AnswerWriter, copy: _Copy, config: RegenerateConfig) -> _Written:
    """Answer a conversation turn by turn, as far as there is room."""
    chat: list[Message] = []
    written: list[tuple[list[int], tuple[int, ...]]] = []
    why_not = ""
    for number, turn in enumerate(_turns(copy.document)):
        prompt, why_not = writer.encode([*chat, *turn])
        if why_not:
            break
        key = writer.key(copy.identity, copy.number, number)
        answer = writer.submit(prompt, key, config.stop, is_chat=True).result()
        chat += [*turn, {"role": "assistant", "content": answer.text}]
        written.append((prompt, answer.tokens))
    if not chat:
        return _Written({}, left_out=why_not)
    return _Written({"messages": chat, **writer.tokens_record(written, is_chat=True)}, cut=why_not)


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
