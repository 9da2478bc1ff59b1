"""Chat templates of published models: files beside the tests, and an npm package for the rest.

The templates of Llama and of DeepSeek-V3 are not copied here, because of their licences. They are
read from the npm package ``@huggingface/ollama-utils``, which is downloaded into a cache outside of
the repository. Tests skip, and say so, where it cannot be had.
"""

import os
import re
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

_FILES = Path(__file__).parent / "templates"
_PACKAGE = "@huggingface/ollama-utils@0.0.18"
_MODULE = "package/src/chat-template-automap.ts"

IN_PACKAGE = {
    "deepseek_v3": "library/deepseek-v3:671b",
    "llama3_1": "library/llama3.1:8b",
    "llama3_2": "library/llama3.2:3b",
    "llama4": "library/llama4:latest",
    "phi4_mini": "library/phi4-mini:3.8b",
    "phi4_reasoning": "library/phi4-reasoning:14b",
}

TEMPLATES = (*sorted(path.stem for path in _FILES.glob("*.jinja")), *IN_PACKAGE)


def template(name: str) -> str:
    """Return a chat template, or skip the test."""
    if name not in IN_PACKAGE:
        return (_FILES / f"{name}.jinja").read_text(encoding="utf-8")
    module = _module()
    if not module.is_file():
        pytest.skip(f"NOT TESTED with the template of {name}: {module} is missing")
    pattern = re.escape(f'model: "{IN_PACKAGE[name]}"') + r'\s*,\s*gguf:\s*"((?:[^"\\]|\\.)*)"'
    match = re.search(pattern, module.read_text(encoding="utf-8"), re.DOTALL)
    if match is None:
        pattern = pattern.replace('"((?:[^"\\\\]|\\\\.)*)"', r"'((?:[^'\\]|\\.)*)'")
        match = re.search(pattern, module.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None, name
    escapes = {"n": "\n", "t": "\t"}
    return re.sub(
        r"\\(.)", lambda match: escapes.get(match[1], match[1]), match[1], flags=re.DOTALL
    )


@cache
def _module() -> Path:
    """Return the package's module with templates; no file is there if it cannot be had."""
    root = os.environ.get("SPECJAX_TEST_TEMPLATES")
    cached = Path(root) if root else Path.home() / ".cache" / "specjax-tests" / "templates"
    module = cached / "ollama-utils-0.0.18.ts"
    if module.is_file():
        return module
    cached.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached) as temporary:
        command = ["npm", "pack", _PACKAGE, "--silent"]
        try:
            subprocess.run(command, cwd=temporary, check=True, capture_output=True, timeout=300)
            (archive,) = Path(temporary).glob("*.tgz")
            with tarfile.open(archive) as contents:
                source = contents.extractfile(_MODULE)
                assert source is not None
                module.write_bytes(source.read())
        except (OSError, subprocess.SubprocessError, ValueError):
            pass  # the tests say what they could not be run with
    return module
