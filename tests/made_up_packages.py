"""Make folders with the metadata of packages that are not installed, as pip leaves it."""

from collections.abc import Sequence
from pathlib import Path

JAX = (
    "jaxlib<=0.12.0.1,>=0.11.2",
    'jaxlib==0.11.2; extra == "ci"',
    'jaxlib<=0.12.0.1,>=0.12.0.1; extra == "tpu"',
    'libtpu==0.0.50.*; extra == "tpu"',
    'jaxlib<=0.12.0.1,>=0.12.0.1; extra == "cuda12"',
    'jax-cuda12-plugin[with-cuda]<=0.12.0.1,>=0.12.0.1; extra == "cuda12"',
    'jax-cuda13-plugin[with-cuda]<=0.12.0.1,>=0.12.0.1; extra == "cuda13"',
)
"""What JAX 0.12.0.1 requires: some lines of its own metadata."""

SPECJAX = ("jax>=0.10,<0.13", "flax<0.13,>=0.12.4", 'torch==2.13.0; extra == "test"')


def install(folder: Path, name: str, version: str, requirements: Sequence[str] = ()) -> None:
    """Write the metadata of a package into ``folder``."""
    directory = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True)
    lines = [
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {line}" for line in requirements),
    ]
    # The description is below the empty line: there a line that looks like a field is none.
    text = "\n".join(["Metadata-Version: 2.4", *lines, "", "Requires-Dist: nothing>=1", ""])
    (directory / "METADATA").write_text(text)


def install_fitting(folder: Path, *without: str) -> None:
    """Write the metadata of packages that fit each other, except those ``without``."""
    everything = (
        ("jax", "0.12.0.1", JAX),
        ("jaxlib", "0.12.0.1", ()),
        ("flax", "0.12.8", ()),
        ("specjax", "0.1.0", SPECJAX),
    )
    for name, version, requirements in everything:
        if name not in without:
            install(folder, name, version, requirements)
