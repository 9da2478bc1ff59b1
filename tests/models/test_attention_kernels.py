"""Attention kernels: which of them run, what the log says, and what runs instead."""

import json
import logging
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from specjax.errors import InputError
from specjax.models.attention import Filled, attend, kernels, kernels_status
from specjax.sharding import make_mesh

TRITON = "__gpu$xla.gpu.triton"
"""The name of Triton's kernels in a program."""

H100 = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")

WARNING = (
    "The Pallas Triton backend is deprecated and will be removed in a future JAX version. To keep"
    " using Pallas on GPU"
)
"""The warning that JAX 0.12 gives at every kernel that it lowers; 0.10 gives none."""


def gpu(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


@pytest.fixture(autouse=True)
def _forget_what_was_logged():
    kernels._log_once.cache_clear()
    yield
    kernels._log_once.cache_clear()


@pytest.fixture
def local_gpus(monkeypatch):
    return lambda *devices: monkeypatch.setattr(kernels, "_local_gpus", lambda: devices)


def lowered(count: int = 1) -> str:
    """Return the program of attention, lowered for an H100.

    ``count`` queries attend to a cache and to themselves.
    """
    cached, new = (tuple(jnp.zeros((1, 1, n, 16)) for _ in range(2)) for n in (32, count))
    pieces = [Filled(cached, jnp.array([20])), (new, jnp.ones((1, count, count), bool))]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H100)):
        traced = jax.jit(lambda q: attend(q, pieces)).trace(jnp.zeros((1, count, 2, 16)))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def log_messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("specjax")]


# --- what is used ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "capability", "is_used", "reason"),
    [
        ("cuda", None, True, "Pallas Triton"),
        ("cuda", (9, 0), True, "Pallas Triton"),
        ("cuda", (8, 0), True, "Pallas Triton"),
        ("cuda", (7, 5), False, "compute capability 8.0 and newer, and this one has 7.5"),
        ("rocm", None, False, "NVIDIA"),
        ("tpu", None, True, "Pallas for TPUs"),
        ("cpu", None, False, "TPUs and GPUs only"),
    ],
)
def test_the_status_says_whether_a_kernel_is_used_and_why(
    platform, capability, is_used, reason
) -> None:
    status = kernels_status(platform, capability)
    assert (status.platform, status.is_used) == (platform, is_used)
    assert reason in status.reason


def test_without_pallas_triton_the_status_of_gpus_says_so_and_that_of_tpus_stays(
    monkeypatch,
) -> None:
    monkeypatch.setattr(kernels, "triton", None)
    monkeypatch.setattr(kernels, "WHY_NO_TRITON", "JAX 9 has no Pallas Triton")
    assert not kernels_status("cuda").is_used
    assert kernels_status("cuda", (9, 0)).reason == "JAX 9 has no Pallas Triton"
    assert kernels_status("tpu").is_used


@pytest.mark.parametrize(
    ("devices", "platform", "is_used"),
    [
        ([gpu("9.0"), gpu("8.9")], "cuda", True),
        ([gpu("9.0"), gpu("7.5")], "cuda", False),  # a program runs on all of them
        ([gpu("12.0")], "cuda", True),  # 12.0 is newer than 8.0, though not as a text
        ([gpu("gfx942")], "rocm", False),
        ([SimpleNamespace(platform="tpu")], "tpu", True),
        ([SimpleNamespace(platform="cpu")], "cpu", False),
    ],
)
def test_without_a_platform_the_status_is_that_of_this_process(
    devices, platform, is_used, monkeypatch
) -> None:
    monkeypatch.setattr(kernels.jax, "devices", lambda *_: devices)
    status = kernels_status()
    assert (status.platform, status.is_used) == (platform, is_used)


@pytest.mark.parametrize("platform", [None, "tpu", "cpu", "rocm"])
def test_a_capability_is_of_nvidias_gpus_alone(platform) -> None:
    with pytest.raises(InputError, match=r"capability=\(7, 5\): it belongs to an NVIDIA GPU"):
        kernels_status(platform, capability=(7, 5))


def test_on_gpus_of_another_maker_the_log_says_so_once(local_gpus, caplog) -> None:
    local_gpus(gpu("gfx942"))
    for count in (1, 2):
        assert TRITON not in lowered(count)
    assert log_messages(caplog) == [
        f"attention uses plain JAX on GPUs, without a kernel: {kernels._ONLY_NVIDIA}"
    ]


def test_another_platform_is_refused() -> None:
    with pytest.raises(InputError, match="platform='metal': give cuda, rocm, tpu or cpu"):
        kernels_status("metal")


# --- what is lowered ------------------------------------------------------------------------------


def test_on_a_gpu_that_is_too_old_attention_is_lowered_to_plain_jax_and_the_log_says_so_once(
    local_gpus, caplog
) -> None:
    local_gpus(gpu("7.5"))
    for count in (1, 2, 3):
        text = lowered(count)
        assert TRITON not in text and "dot_general" in text
    (line,) = log_messages(caplog)
    assert line == (
        "attention uses plain JAX on GPUs, without a kernel: Triton compiles for GPUs of compute"
        " capability 8.0 and newer, and this one has 7.5"
    )
    (record,) = [record for record in caplog.records if record.name.startswith("specjax")]
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("devices", [[gpu("8.0")], [gpu("9.0"), gpu("12.0")], []])
def test_on_gpus_that_are_new_enough_or_not_there_it_is_lowered_to_the_kernel(
    devices, local_gpus, caplog
) -> None:
    local_gpus(*devices)
    assert TRITON in lowered()
    assert not log_messages(caplog)


def test_what_a_mesh_is_made_of_counts_and_not_what_is_here(local_gpus, caplog) -> None:
    local_gpus(gpu("7.5"))
    assert kernels.takes_triton(make_mesh(1, 1))  # of CPUs
    assert not kernels.takes_triton(None)
    assert len(log_messages(caplog)) == 1


def test_a_program_for_a_cpu_says_nothing_of_gpus(monkeypatch, caplog) -> None:
    monkeypatch.setattr(kernels, "triton", None)
    monkeypatch.setattr(kernels, "WHY_NO_TRITON", "JAX 9 has no Pallas Triton")
    assert not kernels.takes_triton(make_mesh(1, 1)) and not kernels.takes_triton(None)
    assert not log_messages(caplog)


WITHOUT_TRITON = """
import json, logging, sys
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append((record.name, record.levelname, record.getMessage()))
logging.getLogger("specjax").addHandler(handler)
sys.modules["jax.experimental.pallas.triton"] = None  # as of a module that is not there
import specjax
from specjax.models.attention import kernels_status
from tests.models.test_attention_kernels import lowered
at_import = list(lines)
texts = [lowered(count) for count in (1, 2)]
calls_triton = ["triton" in text for text in texts]
multiplies = ["dot_general" in text for text in texts]
print(json.dumps([at_import, lines, calls_triton, multiplies, kernels_status("cuda").reason]))
"""


@pytest.mark.full
def test_a_jax_without_pallas_triton_imports_and_lowers_to_plain_jax_with_one_line_in_the_log() -> (
    None
):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True
    )
    at_import, lines, calls_triton, multiplies, reason = json.loads(run.stdout.splitlines()[-1])
    assert not at_import
    assert re.match(
        rf"JAX {re.escape(jax.__version__)} has no Pallas Triton"
        r" \(.*jax.experimental.pallas.triton",
        reason,
    )
    text = f"attention uses plain JAX on GPUs, without a kernel: {reason}"
    assert lines == [["specjax.models.attention.kernels", "WARNING", text]]
    assert calls_triton == [False, False] and multiplies == [True, True]


def test_a_pallas_triton_that_lacks_what_the_kernel_needs_is_none(monkeypatch) -> None:
    rest = SimpleNamespace(CompilerParams=object, load=None)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", rest)
    module, reason = kernels._import_triton()
    assert module is None and reason == f"Pallas Triton of JAX {jax.__version__} has no store"


# --- what JAX warns of ----------------------------------------------------------------------------


def test_where_warnings_are_errors_that_of_tritons_end_is_none_and_others_are() -> None:
    """JAX 0.12 warns at the kernel; for older versions the test gives the same warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TRITON in lowered(4)
        warnings.warn_explicit(
            WARNING, DeprecationWarning, "pallas_call.py", 1, module="jax._src.pallas.pallas_call"
        )
        with pytest.raises(DeprecationWarning, match="something else"):
            warnings.warn_explicit(
                "something else is deprecated", DeprecationWarning, "pallas_call.py", 1
            )


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.10 does not warn")
def test_the_warning_that_is_hidden_is_the_one_that_jax_gives(monkeypatch) -> None:
    monkeypatch.setattr(kernels.warnings, "filterwarnings", lambda *_: None)
    with pytest.warns(DeprecationWarning, match=re.escape(WARNING)):
        lowered(5)


def test_a_program_for_a_cpu_leaves_warnings_as_they_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        assert kernels.takes_triton(make_mesh(1, 1))
        assert warnings.filters == before
