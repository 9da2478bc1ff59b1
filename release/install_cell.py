# @title Installs specjax for this machine: run this cell first
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib import metadata

# What pip installs: a folder, or an address such as git+https://... The environment variable
# SPECJAX_SOURCE replaces it.
SOURCE = ""


def find_extra():
    """Return the extra of specjax with this machine's JAX: tpu, cuda13, cuda12, or none."""
    if shutil.which("nvidia-smi"):
        shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
        cuda = re.search(r"CUDA[\w ]* Version: (\d+)", shown)  # the newest that the driver can run
        if cuda and int(cuda[1]) >= 12:
            return "cuda13" if int(cuda[1]) >= 13 else "cuda12"
    has_tpu = {"COLAB_TPU_ADDR", "TPU_WORKER_ID"} & os.environ.keys()
    return "tpu" if has_tpu or glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*") else ""


def find_source():
    """Return the arguments of pip that name specjax, without its extra."""
    source = os.environ.get("SPECJAX_SOURCE")
    if not source and is_clone(".."):
        # A running Python does not notice that -e adds a folder.
        sys.path.insert(0, os.path.abspath(".."))
        return ["-e", ".."]
    return [source or SOURCE]


def is_clone(folder):
    """Return whether a folder holds specjax, rather than a project with a copy of the notebook."""
    file = os.path.join(folder, "pyproject.toml")
    return os.path.exists(file) and re.search(
        r'^name = "specjax"$', open(file, encoding="utf-8").read(), re.MULTILINE
    )


def run_pip(*arguments):
    """Run pip, and print its output if it fails."""
    print("pip", *arguments)
    command = [sys.executable, "-m", "pip", *arguments]
    pip = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if pip.returncode:
        print(pip.stdout)
        sys.exit("pip failed: see above")


def imported_versions():
    """Return the versions of JAX and of its dependencies that this Python has imported.

    It cannot import other versions of them.
    """
    return {
        name: metadata.version(name)
        for name in ("jax", "jaxlib", "ml_dtypes", "numpy", "scipy")
        if name in sys.modules
    }


imported = imported_versions()
has_changed = False
# Another project has the same import name, and no such module.
if not (importlib.util.find_spec("specjax") and importlib.util.find_spec("specjax.installation")):
    *options, source = find_source()
    if not source:
        sys.exit(
            "specjax has no public address yet: open this notebook in a clone, or set"
            " SPECJAX_SOURCE to a folder or an address"
        )
    extra = find_extra()
    bracket = f"[{extra}]" if extra else ""
    run_pip(
        "install", *options, f"specjax{bracket} @ {source}" if "://" in source else source + bracket
    )
    importlib.invalidate_caches()
    has_changed = True

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it would warn of is put right here
    from specjax import __version__ as specjax_version
    from specjax.installation import find_mismatches

# A libtpu or plugin that came with another JAX is brought up to date, or removed if this machine
# has no use for it.
for remedy in dict.fromkeys(mismatch.remedy for mismatch in find_mismatches(with_devices=True)):
    run_pip(*remedy)
    has_changed = True
for mismatch in find_mismatches():
    sys.exit(f"{mismatch.problem}: {mismatch.command}")

replaced = [
    f"{name} {version}" for name, version in imported.items() if metadata.version(name) != version
]
if replaced or (has_changed and "jax" in sys.modules):
    had = ", ".join(replaced) or "JAX"
    sys.exit(
        f"Restart the session and run the notebook again: it had imported {had} before this cell"
        " installed what fits"
    )
print(f"specjax {specjax_version} with JAX {metadata.version('jax')}")
