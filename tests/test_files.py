"""Check that files are written whole or not at all, and that an error names a full disk.

``/dev/full`` stands for the disk: a write into it finds no space left. Only safetensors makes files
of its own.
"""

import ast
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from matplotlib.figure import Figure
from safetensors import SafetensorError

import specjax
from specjax import files
from specjax.client.exchange import Exchange
from specjax.client.journal import Journal
from specjax.errors import InputError
from specjax.files import FullDiskError, is_full_disk, mount_point, replacing, write_text, writing
from specjax.models import checkpoint
from specjax.reports import pictures
from tests.client.test_journal import REQUEST
from tests.conftest import tiny_target

SOURCE = Path(specjax.__file__).parent
NAMES = ("results.json",)


def fill_disk(monkeypatch, *names: str) -> None:
    """Let there be no space for files of these names in any scratch directory.

    There is none for scratch files of `writing` either.
    """
    make = tempfile.mkdtemp

    def on_full_disk(**options: str) -> str:
        scratch = make(**options)
        for name in names:
            os.symlink("/dev/full", Path(scratch) / name)
        return scratch

    monkeypatch.setattr(tempfile, "mkdtemp", on_full_disk)
    write = files._on_the_way

    def into_full_disk(scratch: Path, created: object) -> object:
        if not scratch.exists():
            os.symlink("/dev/full", scratch)
        return write(scratch, created)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(files, "_on_the_way", into_full_disk)

    def save_file(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        # This is the wording of safetensors itself.
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(checkpoint, "save_file", save_file)


def left_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def save_target(path: Path) -> None:
    tiny_target().save_pretrained(path)


def save_drafter(path: Path) -> None:
    specjax.Eagle3.init(tiny_target(), jax.random.key(0)).save_pretrained(path, target="t")


def save_reports(path: Path) -> None:
    with replacing(path) as scratch:
        (scratch / "results.json").write_text("{}")


def save_twice(path: Path) -> None:
    """Save a checkpoint into another scratch directory first, as ``convert`` does."""
    with replacing(path) as scratch:
        tiny_target().save_pretrained(scratch)


def save_text(path: Path) -> None:
    write_text(path / "a.txt", "text")


@pytest.mark.parametrize("save", [save_target, save_drafter, save_reports, save_twice, save_text])
def test_a_full_disk_is_named_and_nothing_is_left_behind(tmp_path, monkeypatch, save) -> None:
    fill_disk(monkeypatch, *NAMES)
    path = tmp_path / "deep" / "out"
    with pytest.raises(FullDiskError) as raised:
        save(path)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(str(path)) and f"no space left on {mount_point(tmp_path)}, " in line
    # Nobody knows how much more the reports would have taken.
    assert ("needs about 1 MB" in line) == (save is not save_reports)
    assert left_in(tmp_path) == [] and not files._unfinished


@pytest.mark.parametrize("save", [save_target, save_drafter, save_reports, save_twice, save_text])
def test_what_was_there_before_is_kept_on_a_full_disk(tmp_path, monkeypatch, save) -> None:
    path = tmp_path / "out"
    save(path)
    before = {name: (path / name).read_bytes() for name in left_in(path)}
    fill_disk(monkeypatch, *NAMES)
    with pytest.raises(FullDiskError):
        save(path)
    assert {name: (path / name).read_bytes() for name in left_in(path)} == before
    assert left_in(tmp_path) == ["out", *(f"out/{name}" for name in sorted(before))]


def test_a_picture_on_a_full_disk(tmp_path, monkeypatch) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(FullDiskError, match=r"a\.png: no space left on "):
        pictures.save(Figure(), "plot", tmp_path / "a.png")
    assert left_in(tmp_path) == []


def test_a_journal_on_a_full_disk(tmp_path, monkeypatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(FullDiskError, match=r"text\.json: no space left on .*needs about 1 MB"):
        Journal(tmp_path / "text.json").keep(Exchange(REQUEST))
    assert left_in(tmp_path) == []


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path) -> None:
    for write in (replacing, writing):
        with (
            pytest.raises(FullDiskError, match="needs about 1,000,000,000,000 MB, has "),
            write(tmp_path / "a" / "b", 10**18),
        ):
            pytest.fail("it began to write")
    assert left_in(tmp_path) == []


def test_other_errors_are_passed_on_and_leave_nothing_behind(tmp_path) -> None:
    for error in (OSError(errno.EACCES, "denied"), ValueError("wrong"), KeyboardInterrupt()):
        for write in (replacing, writing):
            with pytest.raises(type(error)) as raised, write(tmp_path / "a" / "b"):
                raise error
            assert raised.value is error
    assert left_in(tmp_path) == []


def test_what_is_being_written_is_discarded_by_a_process_that_ends(tmp_path) -> None:
    with replacing(tmp_path / "a" / "b") as directory, writing(tmp_path / "c" / "d.txt") as file:
        (directory / "half").write_text("ha")
        file.write_text("lf")
        files.discard_unfinished()
        assert left_in(tmp_path) == []
        directory.mkdir(parents=True)  # the end of the block needs them
        file.parent.mkdir()
        file.write_text("")


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EACCES, "No space left on device"), False),
        (
            RuntimeError('Os { code: 28, kind: StorageFull, message: "No space left on device" }'),
            True,
        ),
        (ValueError("x"), False),
    ],
)
def test_errors_that_mean_a_full_disk(error, is_full) -> None:
    assert is_full_disk(error) == is_full


def test_a_full_disk_is_an_error_of_input() -> None:
    assert issubclass(FullDiskError, InputError)  # so that commands say it in one line


# --- every writer ---------------------------------------------------------------------------------

WRITES = {
    *("write_text", "write_bytes", "savefig", "save_file", "copyfile", "copytree", "mkstemp"),
    *("mkdtemp", "NamedTemporaryFile"),
}
SAFE = {"replacing", "writing"}
EXCEPTIONS = {
    "files.replacing": "is the safe way itself",
    "text.copy_tokenizer": "copies into a directory that its caller replaces",
    "cli.convert.copy_beside": "copies into a directory that its caller replaces",
    "cli.main._one_speaks": "writes to the standard output, or nowhere",
    "cli.regenerate._append": (
        "adds to a file that the next run goes on with, and names a full disk itself"
    ),
    "training.stored_windows.__init__": "writes into a directory that its caller replaces",
    "training.stored_windows.write": "writes into a directory that its caller replaces",
    "training.cache_lock._write_sign": "is a sign of life, whose content nobody needs",
    "training.run_directory.__init__": "adds to a file that the next run goes on with",
    "training.run_store._locked": "creates the file of a lock, and writes nothing",
    "training.run_store.publish": "makes a directory that is removed after its upload",
    "training.run_store._link": "copies into that directory",
}
"""Functions that write in another way, and why that is right."""


def unsafe_writes(
    tree: ast.AST, function: str = "", is_safe: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield every call that writes a file outside of a block of `SAFE`, with its function."""
    for node in ast.iter_child_nodes(tree):
        inside, safe = function, is_safe
        if isinstance(node, ast.FunctionDef):
            inside = node.name
        if isinstance(node, ast.With):
            calls = [
                item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)
            ]
            safe = is_safe or any(name_of(call) in SAFE for call in calls)
        if isinstance(node, ast.Call) and not safe:
            name = name_of(node)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            constants = [value.value for value in arguments if isinstance(value, ast.Constant)]
            opens = name == "open" and any(
                mode in ("w", "a", "x", "wb", "ab", "xb") for mode in constants
            )
            is_method = not isinstance(node.func, ast.Name)
            if opens or (name in WRITES and is_method) or name == "save_file":
                yield inside, node.lineno
        yield from unsafe_writes(node, inside, safe)


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_every_file_is_written_whole_or_not_at_all() -> None:
    exceptions = set()
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for function, line in unsafe_writes(ast.parse(path.read_text())):
            name = f"{module}.{function}"
            assert name in EXCEPTIONS, (
                f"{path}:{line}: write in a block of specjax.files.replacing or writing"
            )
            exceptions.add(name)
    assert exceptions == EXCEPTIONS.keys()
