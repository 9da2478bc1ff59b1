"""Whether the installed packages fit each other: JAX, what it needs for TPUs and GPUs, and what specjax itself needs.

Only the packages' metadata is read. Nothing is imported, and no device is touched: it works where `import jax` fails, and takes
milliseconds. Which libtpu or plugin fits a JAX is written in JAX's own metadata, as the requirements of its extras.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PLUGINS = {
    "libtpu": "tpu",
    "jax-cuda13-plugin": "cuda13",
    "jax-cuda13-pjrt": "cuda13",
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda12-pjrt": "cuda12",
}
"""The packages through which JAX reaches an accelerator, and the extra of JAX, and of specjax, that brings each."""

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"""\s*extra\s*==\s*["']([\w-]+)["']\s*""")
_TPU_VARIABLES = ("COLAB_TPU_ADDR", "TPU_WORKER_ID")


class Mismatch(NamedTuple):
    """Something installed that does not fit, or something that is missing.

    Attributes:
        problem: what does not fit what, in a sentence without its full stop.
        remedy: the arguments of pip that put it right.
    """

    problem: str
    remedy: tuple[str, ...]

    @property
    def command(self) -> str:
        """The remedy as a line for a shell."""
        import shlex

        return shlex.join((sys.executable, "-m", "pip", *self.remedy))  # the pip on the PATH may be another Python's


class Requirement(NamedTuple):
    """A line of a package's requirements.

    Attributes:
        name: of the package that is required.
        versions: that fit, such as ``>=0.10,<0.13``.
        extra: with which the line counts; empty where it always does.
    """

    name: str
    versions: str
    extra: str


class Package:
    """An installed package, as its metadata describes it.

    Attributes:
        name: as it was looked up.
        version: of the package.
    """

    def __init__(self, name: str, header: str) -> None:
        self.name, self._header = name, header
        self.version = next(self._field("Version"), "")

    @cached_property
    def requirements(self) -> list[Requirement]:
        """What it requires, but for lines that depend on more than an extra."""
        return list(parse_requirements(self._field("Requires-Dist")))

    def _field(self, field: str) -> Iterator[str]:
        prefix = f"{field}: "
        return (line[len(prefix) :].strip() for line in self._header.splitlines() if line.startswith(prefix))


def parse_requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    """Return the requirements that ``lines`` state, in the form of ``Requires-Dist`` or of a requirements file.

    Lines whose marker is more than an extra are left out: none of those that are compared here has one.

    Examples:
        >>> from specjax.installation import parse_requirements
        >>> next(parse_requirements(['libtpu==0.0.50.*; extra == "tpu"']))
        Requirement(name='libtpu', versions='==0.0.50.*', extra='tpu')
    """
    for line in lines:
        text = line.partition("#")[0].strip()
        match = _REQUIREMENT.fullmatch(text)
        marker = match and match[3]
        extra = _EXTRA.fullmatch(marker) if marker else None
        if match and bool(marker) == bool(extra):
            yield Requirement(match[1], match[2].strip().strip("()"), extra[1] if extra else "")


def find_package(name: str, path: Sequence[str] | None = None) -> Package | None:
    """Return the installed package of that name, None where there is none.

    Args:
        name: of the package, as package indexes spell it.
        path: folders to look in; by default ``sys.path``.
    """
    for distribution in metadata.distributions(name=name, path=sys.path if path is None else list(path)):
        # Text is cut and not parsed: importlib.metadata would read all of a description as an e-mail, which takes longer.
        header = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
        package = Package(name, header)
        if package.version:  # what a broken uninstallation leaves behind has none
            return package
    return None


def has_nvidia_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU is on this machine, by its devices: what JAX looks at, too."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))


def has_tpu() -> bool:
    """Return whether this machine has a TPU, by its devices and by the variables of Colab and of Google Cloud."""
    return any(name in os.environ for name in _TPU_VARIABLES) or bool(glob("/dev/accel[0-9]*") + glob("/dev/vfio/[0-9]*"))


def cuda_of_driver() -> int | None:
    """Return the major version of CUDA up to which the NVIDIA driver goes; None where ``nvidia-smi`` does not say."""
    import subprocess

    try:
        shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"CUDA[\w ]* Version: (\d+)", shown)
    return int(version[1]) if version else None


def find_mismatches(path: Sequence[str] | None = None, *, with_devices: bool = False) -> list[Mismatch]:
    """Return what does not fit: JAX and its parts among each other, and the packages that specjax needs.

    Args:
        path: folders where packages lie; by default ``sys.path``.
        with_devices: also an accelerator of this machine that JAX has no package for. This may ask ``nvidia-smi``.

    Examples:
        >>> from specjax.installation import find_mismatches
        >>> for mismatch in find_mismatches():
        ...     print(mismatch.problem, mismatch.command)
    """
    try:
        import packaging.specifiers  # noqa: F401
    except ImportError:  # without it no two versions can be compared
        return [Mismatch("packaging is not installed, and specjax needs it", ("install", "packaging"))]
    installation = _Installation(path)
    found = [*installation.around_jax(), *installation.around_specjax()]
    return found + (installation.without_package() if with_devices else [])


def warn_of_mismatches() -> None:
    """Warn of all mismatches at once, in the name of the code that imports specjax."""
    mismatches = find_mismatches()
    if mismatches:
        listed = "; ".join(f"{mismatch.problem}: {mismatch.command}" for mismatch in mismatches)
        warnings.warn(f"{listed} (python -m specjax env says more)", stacklevel=3)


def is_within(version: str, versions: str) -> bool:
    """Return whether a ``version`` is one of ``versions``; True where either cannot be read, which nobody can put right here.

    Examples:
        >>> from specjax.installation import is_within
        >>> is_within("0.0.50.1", "==0.0.50.*"), is_within("0.0.21.1", "==0.0.50.*")
        (True, False)
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


class _Installation:
    """The packages that are compared, and what is to be done where they do not fit."""

    def __init__(self, path: Sequence[str] | None) -> None:
        self._path = path
        self.jax = find_package("jax", path)
        self.plugins = [package for name in PLUGINS if (package := find_package(name, path))]
        self.needed = list(_needs_of_specjax(path))

    def around_jax(self) -> Iterator[Mismatch]:
        """Yield what does not fit JAX: jaxlib, libtpu and plugins."""
        if self.jax is None:  # specjax needs it, and that is said there
            return
        extras = {PLUGINS[plugin.name] for plugin in self.plugins if self._fits_jax(plugin)}
        jaxlib = find_package("jaxlib", self._path)
        for requirement in self.jax.requirements:
            if requirement.name != "jaxlib" or requirement.extra not in ("", *extras):
                continue
            if jaxlib is None or not is_within(jaxlib.version, requirement.versions):
                yield Mismatch(_problem(jaxlib, requirement, self.jax), self._jax_that_fits())
                break
        misfits = {PLUGINS[plugin.name]: plugin for plugin in reversed(self.plugins) if not self._fits_jax(plugin)}
        for plugin in misfits.values():  # one of each kind: a plugin and its PJRT package have one remedy
            yield Mismatch(_problem(plugin, self._demand(plugin), self.jax), self._plugin_that_fits(plugin))

    def around_specjax(self) -> Iterator[Mismatch]:
        """Yield the packages that specjax needs and that are missing, or of a version that does not fit."""
        for requirement in self.needed:
            package = find_package(requirement.name, self._path)
            if package is None or not is_within(package.version, requirement.versions):
                install = ("install", "-U", requirement.name + requirement.versions)
                remedy = self._jax_that_fits() if requirement.name == "jax" else install
                yield Mismatch(_problem(package, requirement, None), remedy)

    def without_package(self) -> list[Mismatch]:
        """Return the accelerators of this machine for which JAX has no package."""
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            return []
        extras = {PLUGINS[plugin.name] for plugin in self.plugins}
        absent = []
        if has_nvidia_gpu() and not extras & {"cuda12", "cuda13"} and (cuda := cuda_of_driver() or 0) >= 12:
            extra = "cuda13" if cuda >= 13 else "cuda12"
            absent.append(Mismatch("this machine has an NVIDIA GPU, and JAX has no plugin for it", self._jax_that_fits(extra)))
        if has_tpu() and "tpu" not in extras:
            absent.append(Mismatch("this machine has a TPU, and libtpu is not installed", self._jax_that_fits("tpu")))
        return absent

    def _demand(self, plugin: Package) -> Requirement:
        """Return what JAX requires of a plugin. A PJRT package goes with the plugin of the same version."""
        assert self.jax is not None
        extra = PLUGINS[plugin.name]
        name = plugin.name.replace("-pjrt", "-plugin")
        demands = [each for each in self.jax.requirements if (each.name, each.extra) == (name, extra)]
        # A JAX without such an extra is older or newer than this kind of plugin, and works with none of them.
        return Requirement(plugin.name, demands[0].versions if demands else "<0", extra)

    def _fits_jax(self, plugin: Package) -> bool:
        return is_within(plugin.version, self._demand(plugin).versions)

    def _plugin_that_fits(self, plugin: Package) -> tuple[str, ...]:
        """Return how to put a plugin right: by another version where it is in use, otherwise without it."""
        if PLUGINS[plugin.name] in self._extras_in_use():
            return self._jax_that_fits()
        return "uninstall", "-y", *(each.name for each in self.plugins if PLUGINS[each.name] == PLUGINS[plugin.name])

    def _jax_that_fits(self, *extras: str) -> tuple[str, ...]:
        """Return how to install JAX with all its parts: the version that is here, if specjax can use it."""
        bounds = next((each.versions for each in self.needed if each.name == "jax"), "")
        is_fit = self.jax is not None and is_within(self.jax.version, bounds)
        extra = ",".join(extras or self._extras_in_use())
        versions = f"=={self.jax.version}" if self.jax and is_fit else bounds
        return "install", "-U", f"jax[{extra}]{versions}" if extra else f"jax{versions}"

    def _extras_in_use(self) -> list[str]:
        """Return the extras whose packages are installed for an accelerator of this machine: of CUDA's the newest that fits."""
        fitting = [plugin for plugin in self.plugins if self.jax and self._fits_jax(plugin)]
        cuda = [PLUGINS[plugin.name] for plugin in (*fitting, *self.plugins) if PLUGINS[plugin.name].startswith("cuda")]
        in_use = ["tpu"] if has_tpu() and any(plugin.name == "libtpu" for plugin in self.plugins) else []
        return in_use + (cuda[:1] if has_nvidia_gpu() else [])


def _needs_of_specjax(path: Sequence[str] | None) -> Iterator[Requirement]:
    """Return what specjax needs. In a clone that is not installed a file says so."""
    specjax = find_package("specjax", path)
    if specjax is not None:
        return (requirement for requirement in specjax.requirements if not requirement.extra)
    file = Path(__file__).parents[1] / "requirements.txt"
    return parse_requirements(file.read_text(encoding="utf-8").splitlines() if file.exists() else [])


def _problem(package: Package | None, requirement: Requirement, owner: Package | None) -> str:
    needing = f"{owner.name} {owner.version}" if owner else "specjax"
    versions = "none of it" if requirement.versions == "<0" else requirement.name + requirement.versions
    if package is None:
        return f"{requirement.name} is not installed, and {needing} needs {versions}"
    return f"{package.name} {package.version} is installed, and {needing} needs {versions}"
