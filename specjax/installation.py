"""Check that the installed packages fit together: JAX, its TPU and GPU packages, and specjax.

Only the metadata of packages is read. Nothing is imported, and no device is touched. So the check
works where `import jax` fails, and takes milliseconds. JAX's own metadata states which libtpu or
plugin fits it, as the requirements of its extras.
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
"""The packages that connect JAX to an accelerator, each with the extra of JAX and specjax that
installs it.
"""

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"""\s*extra\s*==\s*["']([\w-]+)["']\s*""")
_TPU_VARIABLES = ("COLAB_TPU_ADDR", "TPU_WORKER_ID")


class Mismatch(NamedTuple):
    """A package that is missing, or that does not fit the others.

    Attributes:
        problem: what does not fit, as a sentence without a full stop.
        remedy: the arguments for pip that correct it.
    """

    problem: str
    remedy: tuple[str, ...]

    @property
    def command(self) -> str:
        """The remedy as a shell command."""
        import shlex

        # The pip on the PATH may belong to another Python.
        return shlex.join((sys.executable, "-m", "pip", *self.remedy))


class Requirement(NamedTuple):
    """A line of a package's requirements.

    Attributes:
        name: the name of the required package.
        versions: the versions that fit, such as ``>=0.10,<0.13``.
        extra: the extra to which the line belongs; empty if it always applies.
    """

    name: str
    versions: str
    extra: str


class Package:
    """An installed package, as its metadata describes it.

    Attributes:
        name: the name under which it was looked up.
        version: its version.
    """

    def __init__(self, name: str, header: str) -> None:
        self.name, self._header = name, header
        self.version = next(self._field("Version"), "")

    @cached_property
    def requirements(self) -> list[Requirement]:
        """The package's requirements, without lines whose marker is more than an extra."""
        return list(parse_requirements(self._field("Requires-Dist")))

    def _field(self, field: str) -> Iterator[str]:
        prefix = f"{field}: "
        return (
            line[len(prefix) :].strip()
            for line in self._header.splitlines()
            if line.startswith(prefix)
        )


def parse_requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    """Parse requirements in the form of ``Requires-Dist`` or of a requirements file.

    Lines whose marker is more than an extra are left out: no package that is compared here has one.

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
    """Return an installed package; None if it is not installed.

    Args:
        name: the name of the package, as package indexes spell it.
        path: the folders to search; by default ``sys.path``.
    """
    for distribution in metadata.distributions(
        name=name, path=sys.path if path is None else list(path)
    ):
        # Not `distribution.metadata`: it parses the whole description as an e-mail, which is slow.
        header = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
        package = Package(name, header)
        if package.version:  # the remains of a broken uninstallation have no version
            return package
    return None


def has_nvidia_gpu() -> bool:
    """Return True if this machine has the devices of an NVIDIA driver, which JAX looks for too."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))


def has_tpu() -> bool:
    """Return True if this machine has TPU devices, or the variables of Colab or Google Cloud."""
    return any(name in os.environ for name in _TPU_VARIABLES) or bool(
        glob("/dev/accel[0-9]*") + glob("/dev/vfio/[0-9]*")
    )


def cuda_of_driver() -> int | None:
    """Return the highest CUDA major version that the NVIDIA driver supports.

    Returns None if ``nvidia-smi`` does not report it.
    """
    import subprocess

    try:
        output = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"CUDA[\w ]* Version: (\d+)", output)
    return int(version[1]) if version else None


def find_mismatches(
    path: Sequence[str] | None = None, *, with_devices: bool = False
) -> list[Mismatch]:
    """List the mismatches: among JAX and its packages, and in the packages that specjax needs.

    Args:
        path: the folders with the packages; by default ``sys.path``.
        with_devices: also report an accelerator of this machine for which JAX has no package. This
            may run ``nvidia-smi``.

    Examples:
        >>> from specjax.installation import find_mismatches
        >>> for mismatch in find_mismatches():
        ...     print(mismatch.problem, mismatch.command)
    """
    try:
        import packaging.specifiers  # noqa: F401
    except ImportError:  # versions cannot be compared without it
        return [
            Mismatch("packaging is not installed, but specjax needs it", ("install", "packaging"))
        ]
    installation = _Installation(path)
    mismatches = [*installation.around_jax(), *installation.around_specjax()]
    return mismatches + (installation.without_package() if with_devices else [])


def warn_of_mismatches() -> None:
    """Issue one warning with all mismatches, attributed to the code that imports specjax."""
    mismatches = find_mismatches()
    if mismatches:
        listed = "; ".join(f"{mismatch.problem}: {mismatch.command}" for mismatch in mismatches)
        warnings.warn(f"{listed} (see python -m specjax env)", stacklevel=3)


def is_within(version: str, versions: str) -> bool:
    """Return True if a version is within a version specifier.

    Unreadable versions and specifiers also give True, because no user could correct them here.

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
    """The installed packages that are compared, and the remedies for mismatches."""

    def __init__(self, path: Sequence[str] | None) -> None:
        self._path = path
        self.jax = find_package("jax", path)
        self.plugins = [package for name in PLUGINS if (package := find_package(name, path))]
        self.needed = list(_needs_of_specjax(path))

    def around_jax(self) -> Iterator[Mismatch]:
        """Yield the packages that do not fit JAX: jaxlib, libtpu and plugins."""
        if self.jax is None:  # `around_specjax` reports that
            return
        extras = {PLUGINS[plugin.name] for plugin in self.plugins if self._fits_jax(plugin)}
        jaxlib = find_package("jaxlib", self._path)
        for requirement in self.jax.requirements:
            if requirement.name != "jaxlib" or requirement.extra not in ("", *extras):
                continue
            if jaxlib is None or not is_within(jaxlib.version, requirement.versions):
                yield Mismatch(_problem(jaxlib, requirement, self.jax), self._jax_that_fits())
                break
        misfits = {
            PLUGINS[plugin.name]: plugin
            for plugin in reversed(self.plugins)
            if not self._fits_jax(plugin)
        }
        for (
            plugin
        ) in misfits.values():  # one per extra: a plugin and its PJRT package have the same remedy
            yield Mismatch(
                _problem(plugin, self._demand(plugin), self.jax), self._plugin_that_fits(plugin)
            )

    def around_specjax(self) -> Iterator[Mismatch]:
        """Yield the packages that specjax needs and that are missing or of a wrong version."""
        for requirement in self.needed:
            package = find_package(requirement.name, self._path)
            if package is None or not is_within(package.version, requirement.versions):
                install = ("install", "-U", requirement.name + requirement.versions)
                remedy = self._jax_that_fits() if requirement.name == "jax" else install
                yield Mismatch(_problem(package, requirement, None), remedy)

    def without_package(self) -> list[Mismatch]:
        """List the accelerators of this machine for which JAX has no package."""
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            return []
        extras = {PLUGINS[plugin.name] for plugin in self.plugins}
        absent = []
        if (
            has_nvidia_gpu()
            and not extras & {"cuda12", "cuda13"}
            and (cuda := cuda_of_driver() or 0) >= 12
        ):
            extra = "cuda13" if cuda >= 13 else "cuda12"
            absent.append(
                Mismatch(
                    "this machine has an NVIDIA GPU, but JAX has no plugin for it",
                    self._jax_that_fits(extra),
                )
            )
        if has_tpu() and "tpu" not in extras:
            absent.append(
                Mismatch(
                    "this machine has a TPU, but libtpu is not installed",
                    self._jax_that_fits("tpu"),
                )
            )
        return absent

    def _demand(self, plugin: Package) -> Requirement:
        """Return JAX's requirement for a plugin. A PJRT package has the version of its plugin."""
        assert self.jax is not None
        extra = PLUGINS[plugin.name]
        name = plugin.name.replace("-pjrt", "-plugin")
        demands = [
            line for line in self.jax.requirements if (line.name, line.extra) == (name, extra)
        ]
        # A JAX without this extra is too old or too new for such plugins: no version of them works.
        return Requirement(plugin.name, demands[0].versions if demands else "<0", extra)

    def _fits_jax(self, plugin: Package) -> bool:
        return is_within(plugin.version, self._demand(plugin).versions)

    def _plugin_that_fits(self, plugin: Package) -> tuple[str, ...]:
        """Return the pip arguments for a misfit plugin: another version if in use, else removal."""
        if PLUGINS[plugin.name] in self._extras_in_use():
            return self._jax_that_fits()
        return (
            "uninstall",
            "-y",
            *(
                package.name
                for package in self.plugins
                if PLUGINS[package.name] == PLUGINS[plugin.name]
            ),
        )

    def _jax_that_fits(self, *extras: str) -> tuple[str, ...]:
        """Return the pip arguments that install JAX with its extras.

        The installed version of JAX stays if specjax can use it.
        """
        bounds = next(
            (requirement.versions for requirement in self.needed if requirement.name == "jax"), ""
        )
        is_fit = self.jax is not None and is_within(self.jax.version, bounds)
        extra = ",".join(extras or self._extras_in_use())
        versions = f"=={self.jax.version}" if self.jax and is_fit else bounds
        return "install", "-U", f"jax[{extra}]{versions}" if extra else f"jax{versions}"

    def _extras_in_use(self) -> list[str]:
        """List the installed extras for the accelerators of this machine.

        Of several CUDA plugins, only the newest that fits is listed.
        """
        fitting = [plugin for plugin in self.plugins if self.jax and self._fits_jax(plugin)]
        cuda = [
            PLUGINS[plugin.name]
            for plugin in (*fitting, *self.plugins)
            if PLUGINS[plugin.name].startswith("cuda")
        ]
        in_use = (
            ["tpu"] if has_tpu() and any(plugin.name == "libtpu" for plugin in self.plugins) else []
        )
        return in_use + (cuda[:1] if has_nvidia_gpu() else [])


def _needs_of_specjax(path: Sequence[str] | None) -> Iterator[Requirement]:
    """Return the requirements of specjax. A clone that is not installed has them in a file."""
    specjax = find_package("specjax", path)
    if specjax is not None:
        return (requirement for requirement in specjax.requirements if not requirement.extra)
    file = Path(__file__).parents[1] / "requirements.txt"
    return parse_requirements(
        file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    )


def _problem(package: Package | None, requirement: Requirement, owner: Package | None) -> str:
    needing = f"{owner.name} {owner.version}" if owner else "specjax"
    if requirement.versions == "<0":
        versions = "no version of it"
    else:
        versions = requirement.name + requirement.versions
    if package is None:
        return f"{requirement.name} is not installed, but {needing} needs {versions}"
    return f"{package.name} {package.version} is installed, but {needing} needs {versions}"
