"""The command ``specjax regenerate``: rewrite a data set with the target's own answers.

A drafter has to predict the target's text, so it learns more from the target's own answers than
from those of other authors.
"""

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specjax import pipeline, stores
from specjax.cli import shards
from specjax.cli.grammars import read_grammar
from specjax.config import differences, dump_yaml, load_yaml
from specjax.errors import InputError, check_minimum
from specjax.files import FullDiskError, is_full_disk, write_text
from specjax.grammars import Grammar
from specjax.progress import waiting
from specjax.regeneration import NOT_ENCODED, AnswerWriter, positions_of
from specjax.sampling_params import SamplingParams
from specjax.sharding import mesh_for
from specjax.text import check_stop, read_json_lines
from specjax.training import fingerprint
from specjax.training.documents import check_one_kind, find_origin, identities, read_documents
from specjax.training.records import REGENERATED_FROM, Document, Message
from specjax.training.unusable import MAX_UNUSABLE, RecordTally, UnusableRecordError, check_share
from specjax.training.written import NOTE


@dataclass(frozen=True)
class RegenerateConfig:
    """Rewrite a data set with the target: all answers of conversations, or continuations of texts.

    The same command continues a run that was interrupted, and adds documents that are new in the
    source: documents are recognized by their content. The options and the fingerprints of the
    target, its tokenizer and the chat template are stored beside the output. The batch size changes
    answers at most by rounding. Prompts that leave no room for an answer are left out (in
    conversations, all turns from there on), and the command prints how many.

    A large data set can be divided into shards: each process writes one shard, without
    communication. The shard of a document depends on its content, and its answers do not depend on
    the number of shards.

    Attributes:
        target: the model that writes the answers, a directory or hub id.
        source: data set to rewrite, as ``data.source`` of a training: JSONL, Parquet, a
            directory, ``hf:OWNER/NAME``.
        output: a .jsonl file, or with shard a folder with one such file per shard. Each line is one
            copy of a document, with the document's identity (``document``), the index of the copy
            (``copy``), and the original document (``regenerated_from``), so that training holds out
            all versions of a document or none. Each line also has all token ids (``tokens``) and
            which of them the target generated (``loss_spans``). A training with the same tokenizer
            and chat template uses these ids and does not tokenize the text again.
        shard: "I/N" writes shard I of N, from 0. Under a scheduler, "auto" or "auto/N" uses the
            task index of an array job (Slurm, Kubernetes). The file is renamed when it is complete,
            and a complete file is not written again.
        missing: print which of this many shards are missing in the folder output, and exit with
            status 1 if any is.
        drafter: the drafter, as for generate. It makes generation faster and does not change the
            distribution; "none" is plain decoding.
        draft: shape of the drafts, as for generate.
        prompt_tokens: number of tokens that are kept as the beginning of a text.
        copies: number of times that each document is written, with different random numbers.
        limit: maximum number of documents to read; 0 is all.
        max_unusable: largest share of the records that may be left out because they cannot be used;
            0 refuses the first.
        batch: number of sequences that are decoded together.
        max_new_tokens: maximum number of tokens of an answer or continuation.
        temperature: sampling temperature; 0 is greedy.
        top_p: sample from the most likely tokens with this total probability, in (0, 1].
        seed: random seed.
        chat_template: file with a Jinja chat template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the chat template, as JSON: '{"enable_thinking":
            false}'.
        stop: stop strings of answers in conversations. Use one for the end of a turn if the model
            has no token for it.
        json_schema: file with a JSON schema; every answer is JSON that the schema accepts. The
            fingerprint of its content is stored with the options.
        regex: regular expression that every answer matches as a whole.
        choice: every answer is one of these.
        grammar_after: text or added token, such as </think>, after which the grammar of the three
            options before begins; what comes before it is free.
        mesh: number of devices of each mesh axis, data and model.
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
    max_unusable: float = MAX_UNUSABLE
    batch: int = 16
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    chat_template: str = ""
    chat_template_kwargs: str = ""
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    grammar_after: str = ""
    mesh: tuple[int, int] = (1, 1)


def run_regenerate(config: RegenerateConfig) -> int:
    """Run ``specjax regenerate``."""
    if config.missing:
        return _say_missing(config)
    grammar = _check(config)
    shard, output = None, Path(config.output)
    if config.shard:
        shard = shards.find_shard(config.shard)
        config, output = replace(config, shard=str(shard)), shards.open_shard(output, shard)
    _refuse_foreign(output, config)
    done = _written(output)
    if shard is not None and not shards.is_begun(output):
        print(f"{len(done)} documents in {output}, which is complete")
        return 0
    tally = RecordTally(config.source, "source", config.max_unusable, "max_unusable")
    copies = _copies(config, shard, tally)
    missing = [copy for copy in copies if copy.label not in done]
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
    claim = _claim(config, generator, grammar)
    _refuse_other_model(output, config, claim)
    num_written = 0
    left_out: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    with (
        _answer_writer(
            generator, config, grammar, any(copy.document.messages is not None for copy in copies)
        ) as writer,
        waiting(f"writing {output.name}", len(copies), len(done)) as wait,
    ):
        for results in _write(writer, missing, config):
            num_written += _append(
                output, claim, [result.record for result in results if result.record]
            )
            left_out.update(result.left_out for result in results if result.left_out)
            cut.update(result.cut for result in results if result.cut)
            for result in results:
                if result.unusable is not None and not result.copy_number:
                    tally.leave_out(result.unusable)
            tally.check()
            wait.update(done=wait.done + len(results))
    tally.report()
    if not num_written and not done and shard is None:
        reasons = "; ".join(f"{why}: {count} of {len(copies)}" for why, count in left_out.items())
        raise InputError(f"source={config.source!r}: nothing could be written ({reasons})")
    for what, counts in (("left out", left_out), ("cut before a turn", cut)):
        for why, count in counts.items():
            if why.startswith(NOT_ENCODED) and what == "left out":
                continue  # the tally has reported the records
            print(f"{what}, as {why}: {count} of {len(copies)}")
    if number_gone := len(done - {copy.label for copy in copies}):
        print(f"kept, although no longer in the source: {number_gone}")
    print(
        f"{len(done) + num_written} documents in"
        f" {output if shard is None else shards.finish(output, claim)}"
    )
    return 0


def _check(config: RegenerateConfig) -> Grammar | None:
    """Refuse invalid options before any model or data is read, and return the grammar."""
    check_minimum(1, config, ("batch", "copies", "prompt_tokens", "max_new_tokens"))
    if (
        not config.source
        or not config.output
        or config.output.endswith(".jsonl") == bool(config.shard)
    ):
        kind = "a folder for the shards" if config.shard else "a file that ends in .jsonl"
        raise InputError(
            f"source={config.source!r}, output={config.output!r}: give a data set, and {kind}"
        )
    if stores.is_url(config.output):
        raise InputError(
            f"output={config.output!r}: records are appended to a file; give a local path, or a"
            " bucket that is mounted as a folder"
        )
    check_share("max_unusable", config.max_unusable)
    if config.limit < 0:
        raise InputError(f"limit={config.limit}: must be at least 0; 0 is all")
    check_stop(config.stop)
    return read_grammar(config.json_schema, config.regex, config.choice, config.grammar_after)


def _say_missing(config: RegenerateConfig) -> int:
    """Print the missing shards, and return the exit status."""
    if config.missing < 0 or config.shard or not config.output or config.output.endswith(".jsonl"):
        raise InputError(
            f"missing={config.missing}: give the number of all shards, their folder as --output,"
            " and no --shard"
        )
    missing = shards.missing(Path(config.output), config.missing)
    for shard in missing:
        print(shard)
    if not missing:
        print(f"all {config.missing} shards are in {config.output}")
    return 1 if missing else 0


@dataclass(frozen=True)
class _Copy:
    """A copy of a document that is to be rewritten.

    Attributes:
        document: the document.
        identity: the hash of its content (`identities`).
        number: the index of the copy, from 0.
    """

    document: Document
    identity: str
    number: int

    @property
    def label(self) -> tuple[str, int]:
        """The identity and the index, which identify the record of the copy."""
        return self.identity, self.number

    @property
    def provenance(self) -> dict[str, Any]:
        """The fields of the record besides its content: its label, and its original document."""
        return {
            REGENERATED_FROM: find_origin(self.document),
            "document": self.identity,
            "copy": self.number,
        }


def _copies(
    config: RegenerateConfig, shard: shards.Shard | None, tally: RecordTally
) -> list[_Copy]:
    """Return the copies to write: those of all documents of the source, or of one shard."""
    documents = read_documents(config.source, "source", tally)[: config.limit or None]
    check_one_kind(documents, f"source={config.source!r}")
    documents = _usable(documents)
    return [
        _Copy(document, identity, number)
        for document, identity in zip(documents, identities(documents), strict=True)
        if shard is None or shard.holds(identity)
        for number in range(config.copies)
    ]


def _usable(documents: list[Document]) -> list[Document]:
    """Return the documents that can be rewritten, and print how many cannot."""
    usable = [document for document in documents if document.messages is None or _turns(document)]
    if len(usable) < len(documents):
        print(
            f"left out, as an answer has no question: {len(documents) - len(usable)} of"
            f" {len(documents)}"
        )
    if not usable:
        raise InputError("source: it has no document that can be rewritten")
    return usable


def _is_begun(output: Path) -> bool:
    """Return True if the output has content. Before that, the note beside it has no effect."""
    return output.exists() and output.stat().st_size > 0


def _refuse_foreign(output: Path, config: RegenerateConfig) -> None:
    """Check that the output is new, or was started with the same options.

    The options are stored in a file beside it, which must not replace another file.
    """
    beside = shards.beside(output)
    if not _is_begun(output):
        # A note without output, even an incomplete one, may be overwritten. Other files may not.
        if beside.exists() and not NOTE.startswith(beside.read_text(errors="replace")[: len(NOTE)]):
            raise InputError(
                f"output={config.output!r}: {beside.name}, the file for its options, has other"
                " content: choose another output"
            )
        return
    if not beside.exists():
        raise InputError(
            f"output={config.output!r} exists, but {beside.name} with its options does not: choose"
            " another file"
        )
    earlier = replace(
        load_yaml(RegenerateConfig, beside),
        output=config.output,
        batch=config.batch,
        max_unusable=config.max_unusable,
    )
    if changes := differences(earlier, config):
        raise InputError(
            f"output={config.output!r} was started with other options ({'; '.join(changes)}):"
            " choose another file"
        )


_OF_GRAMMAR = "# with the grammar of the fingerprint"


def _claim(
    config: RegenerateConfig, generator: pipeline.TextGenerator, grammar: Grammar | None
) -> str:
    """Return the note beside the output: the fingerprints of the models, and the options."""
    of_grammar = ""
    if grammar is not None:
        digest = hashlib.sha256(grammar.source.encode()).hexdigest()[:32]
        of_grammar = f"{_OF_GRAMMAR} {digest}\n"
    return (
        f"{NOTE}{fingerprint.of_target(generator.target)}\n# with the tokenizer and the chat"
        " template of the fingerprint"
        f" {fingerprint.of_tokenizer(generator.tokenizer)}\n{of_grammar}{dump_yaml(config)}"
    )


def _refuse_other_model(output: Path, config: RegenerateConfig, claim: str) -> None:
    """Check that the output was written by the same target, tokenizer and grammar.

    Their fingerprints are compared, not their paths.
    """
    if not _is_begun(output):
        return
    noted, expected = (
        [line for line in note.splitlines() if line.startswith("#")]
        for note in (shards.beside(output).read_text(), claim)
    )
    grammars = [
        [line for line in lines if line.startswith(_OF_GRAMMAR)] for lines in (noted, expected)
    ]
    if noted[:2] == expected[:2] and grammars[0] != grammars[1]:
        raise InputError(
            f"json_schema={config.json_schema!r}: its content differs from what the beginning of"
            f" output={config.output!r} was written with: choose another file, or restore it"
        )
    what = "the model or its data type"
    if noted[:1] == expected[:1]:
        what = (
            "its tokenizer, its chat template or the content of"
            f" chat_template={config.chat_template!r}"
        )
    if noted[:2] != expected[:2]:
        raise InputError(
            f"target={config.target!r}: {what} differs from what wrote the beginning of"
            f" output={config.output!r}: choose another file, or restore it"
        )


def _written(output: Path) -> set[tuple[str, int]]:
    """Return the labels of the records in the output. An incomplete last line is removed."""
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
                f"{output}:{number}: the line does not name its document (an older specjax wrote"
                " it): choose another file"
            ) from None
    return labels


def _append(output: Path, claim: str, records: Sequence[dict[str, Any]]) -> int:
    """Append records to the output, and return their number.

    Before the first record, ``claim`` is written beside the output.
    """
    if not records:
        return 0
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    again = "make room, and run the same command again"
    try:
        if not _is_begun(output):
            write_text(shards.beside(output), claim)
        with output.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # an incomplete line is removed when the run continues
        if is_full_disk(error):
            raise FullDiskError(output, len(lines.encode()), again) from None
        raise InputError(
            f"output={str(output)!r}: cannot be written ({error.strerror}): {again}"
        ) from None
    return len(records)


LONGEST = 8192
"""The maximum number of tokens of a conversation, even if the models support more.

The engine reserves pages for it.
"""


def _answer_writer(
    generator: pipeline.TextGenerator,
    config: RegenerateConfig,
    grammar: Grammar | None,
    has_chats: bool,
) -> AnswerWriter:
    """Return the writer, with room for the longest prompt and its answer."""
    max_length = config.max_new_tokens + (LONGEST if has_chats else config.prompt_tokens)
    params = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        max_new_tokens=config.max_new_tokens,
        grammar=grammar,
    )
    capacity = min(positions_of(generator), max(max_length, 2))
    return AnswerWriter(generator, params, rows=config.batch, capacity=capacity)


@dataclass(frozen=True)
class _Written:
    """The result of rewriting a copy.

    Attributes:
        record: the record to write; empty if there is none.
        left_out: why there is no record.
        cut: why a conversation ended before one of its turns.
        unusable: the record of the source, if it is to blame.
        copy_number: the index of the copy.
    """

    record: dict[str, Any]
    left_out: str = ""
    cut: str = ""
    unusable: UnusableRecordError | None = None
    copy_number: int = 0


def _write(
    writer: AnswerWriter, copies: Sequence[_Copy], config: RegenerateConfig
) -> Iterator[list[_Written]]:
    """Yield the results of the copies in their order, ``config.batch`` at a time.

    The engine decodes that many sequences together; when one finishes, the next begins.
    """
    rows = config.batch
    pool = ThreadPoolExecutor(2 * rows)  # a thread waits for each answer
    ahead: deque[Future[_Written]] = deque()
    results: list[_Written] = []
    try:
        for copy in copies:
            ahead.append(pool.submit(_write_one, writer, copy, config))
            # Answers finish in any order but are yielded in that of the copies. More requests than
            # rows are submitted, so that no row is idle while the oldest request is running.
            if len(ahead) == 4 * rows:
                results.append(ahead.popleft().result())
            if len(results) == rows:
                yield results
                results = []
        results += [future.result() for future in ahead]
        if results:
            yield results
    finally:  # after an interrupt, the engine cancels the running requests when it is closed
        pool.shutdown(wait=False, cancel_futures=True)


def _write_one(writer: AnswerWriter, copy: _Copy, config: RegenerateConfig) -> _Written:
    """Rewrite one copy of a document."""
    if copy.document.messages is None:
        result = _write_text(writer, copy, config)
    else:
        result = _write_chat(writer, copy, config)
    return replace(result, record={**result.record, **copy.provenance}) if result.record else result


def _write_text(writer: AnswerWriter, copy: _Copy, config: RegenerateConfig) -> _Written:
    """Continue the beginning of a text."""
    prompt, why_not = writer.encode(copy.document.text or " ", config.prompt_tokens)
    if why_not:
        return _left_out(copy, why_not)
    answer = writer.submit(prompt, writer.key(copy.identity, copy.number)).result()
    return _Written(writer.text_record(prompt, answer))


def _write_chat(writer: AnswerWriter, copy: _Copy, config: RegenerateConfig) -> _Written:
    """Answer a conversation turn by turn, as long as there is room."""
    chat: list[Message] = []
    answered: list[tuple[list[int], tuple[int, ...]]] = []
    why_not = ""
    tools = copy.document.tools
    for index, turn in enumerate(_turns(copy.document)):
        if any(message["role"] == "tool" for message in turn) or (
            chat and chat[-1].get("tool_calls")
        ):
            why_not = "the result of a tool belongs to a call of the source, not of the target"
        else:
            prompt, why_not = writer.encode([*chat, *turn], tools=tools)
        if why_not:
            break
        key = writer.key(copy.identity, copy.number, index)
        answer = writer.submit(prompt, key, config.stop, is_chat=True).result()
        chat += [*turn, writer.message(prompt, answer, config.stop, tools)]
        answered.append((prompt, answer.tokens))
    if not chat:
        return _left_out(copy, why_not)
    record = {"messages": chat, **({"tools": list(tools)} if tools else {})}
    return _Written(record | writer.tokens_record(answered, is_chat=True), cut=why_not)


def _left_out(copy: _Copy, why_not: str) -> _Written:
    """Return the result of a copy that is not rewritten."""
    unusable = None
    if why_not.startswith(NOT_ENCODED):
        unusable = UnusableRecordError(copy.document.place, why_not)
    return _Written({}, why_not, unusable=unusable, copy_number=copy.number)


def _turns(document: Document) -> list[list[Message]]:
    """Return the messages before each answer, since the previous answer.

    The list is empty if an answer has no question.
    """
    turns: list[list[Message]] = []
    current: list[Message] = []
    for message in document.messages or ():
        if message["role"] == "assistant":
            turns, current = [*turns, current], []
        else:
            current = [*current, message]
    if current:  # the last question has no answer yet
        turns.append(current)
    return turns if all(turns) else []
