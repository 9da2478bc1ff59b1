"""Set up all tests: shape checks, eight fake CPU devices, tiny models, and the real ones at hand.

Arrays that should agree up to float32 rounding are compared within 1e-4, the bound that logits must
meet. The tiny models are scaled so that a wrong slot, mask or position changes results by order 1.
"""

import atexit
import os
import shutil
import tempfile
import threading
from importlib.metadata import version

os.environ["SPECJAX_TYPECHECK"] = "1"  # before specjax is imported
# All tests and workers of a run share what they compile, and nothing of an earlier run. It is set
# before jax is imported. `.ci/run` names a folder for the runs of all its tiers, which must be new.
if "PYTEST_XDIST_WORKER" not in os.environ:
    if folder := os.environ.get("SPECJAX_TEST_PROGRAMS"):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath(folder)
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="specjax-tests-")
        atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Most programs are single operations. Reading one takes half the time of compiling it.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Most of the time goes into compiling. With the least effort and XLA's older emitters, it takes a
# quarter of the time; long computations then take half as long again.
_FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# These passes go over every loop and the whole program again and again. They make programs faster;
# without them compiling takes a fifth less.
_FAST_COMPILATION += " --xla_disable_hlo_passes=" + ",".join(
    (
        "while-loop-invariant-code-motion",
        "while-loop-constant-sinking",
        "simplify-while-loops",
        "tree_reduction_rewriter",
        "while-loop-trip-count-annotator",
        "dynamic-dimension-simplifier",
    )
)
# Newer XLA has the newer emitters alone, and ends the process if it is given the flag.
if version("jaxlib").startswith("0.10."):
    _FAST_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
# `make test-thorough` sets it to nothing, so that programs are compiled as users compile them.
os.environ.setdefault("XLA_FLAGS", _FAST_COMPILATION)

import ast
import gc
import json
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")

import specjax
from specjax import progress
from specjax.drafters import MTP, Eagle3
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree
from specjax.models.config import MLA, Indexer, Layer, LinearAttention, ModelConfig, MoE, Rope
from specjax.models.memory import Mamba2
from specjax.models.transformer import Target

pytest_plugins = [
    "pytester",
    "tests.buckets",
    "tests.costs",
    "tests.tiers",
    "tests.mutants.cases",  # imports the one before it
    "tests.time_limit",
]

# Tracing makes very many small objects and little garbage: with Python's own thresholds, the search
# for garbage takes 5% of the time.
gc.set_threshold(50_000, 20, 10)

# JAX 0.10 makes a context of MLIR for each program that it lowers. That takes 8 ms, a quarter of
# what a single operation takes. Here, as in JAX 0.12, all programs of a thread have the same one.
_make_context = mlir.make_ir_context
_contexts = threading.local()


def _context_of_thread() -> Any:
    if not hasattr(_contexts, "context"):
        _contexts.context = _make_context()
    return _contexts.context


if version("jaxlib").startswith("0.10."):
    mlir.make_ir_context = _context_of_thread

_compilations: list[str] = []
# How many programs had been compiled when they were last freed, and when maps were last counted.
_freed = {"at": 0, "looked": 0}
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _seconds, **_: (
        _compilations.append(event) if event.endswith("backend_compile_duration") else None
    )
)


def compilations() -> int:
    """Return how many programs of any kind XLA has compiled so far."""
    return len(_compilations)


MOST_PROGRAMS = 1_500
"""A compiled program and what JAX remembers of it take a megabyte."""

MOST_MAPS = 30_000
"""A compiled program also takes memory maps, some forty if it is compiled as users compile it.

Linux allows a process 65,530 maps; beyond that XLA ends it with no more than "Aborted"."""


@pytest.fixture(autouse=True)
def _free_compiled_programs_in_time():
    """Let modules share compiled programs, and free them all before there are too many.

    What is shared is above all the hundreds of programs of one operation each.
    """
    yield
    if compilations() - _freed["at"] > MOST_PROGRAMS or (
        compilations() > _freed["looked"] + 50 and _maps() > MOST_MAPS
    ):
        _free_compiled_programs()


def _maps() -> int:
    """Return how many memory maps this process has, or 0 if the system does not say."""
    _freed["looked"] = compilations()
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def free_programs_if_there_are_many() -> None:
    """Free all compiled programs before the system refuses this process more memory maps."""
    if _maps() > MOST_MAPS:
        _free_compiled_programs()


def _free_compiled_programs() -> None:
    jax.clear_caches()
    vars(_contexts).clear()
    _freed["at"] = _freed["looked"] = compilations()


@pytest.fixture(autouse=True)
def _shows_nothing_before_and_after(monkeypatch) -> None:
    """Undo `progress.show_waits` if a command of an earlier test has called it."""
    monkeypatch.setattr(progress, "_display", progress._Nothing())


# Its value is a part of the key of everything that JAX caches in this process.
_patches = jax.make_user_context(0)
_patch_numbers = count(1)


@contextmanager
def own_programs() -> Iterator[None]:
    """Keep the programs of a test that patches what is compiled apart from those of other tests.

    They are traced anew inside, in the thread that enters, and are used nowhere else.
    """
    with _patches(next(_patch_numbers)):
        yield


@pytest.fixture
def compiled_anew():
    with own_programs():
        yield


ASSETS = Path(__file__).parents[1] / "specjax" / "assets"
SHARED = Path(__file__).parents[2] / "shared" / "data"


def tiny_config(**changes) -> ModelConfig:
    sizes = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_positions": 512,
    }
    return ModelConfig(**(sizes | changes))


def tiny_target(seed: int = 0, scale: float = 25.0, **changes) -> Target:
    """Return a random model whose distributions are far from uniform.

    ``scale`` multiplies the usual initialisation.
    """
    model = Target.init(tiny_config(**changes), jax.random.key(seed))
    params = jax.tree.map(lambda leaf: leaf * scale if leaf.ndim > 1 else leaf, model.params)
    return model.replace(params=params)


def blocks(pattern: str) -> dict[str, Any]:
    """Return changes of `tiny_config` for a model like Nemotron-H with these layers.

    A letter is a layer: ``M`` of Mamba-2, ``*`` of attention, ``-`` of an MLP alone.
    """
    sizes = Mamba2(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
    states, mlps = (
        tuple(layer for layer, kind in enumerate(pattern) if kind == letter) for letter in "M-"
    )
    return {
        "model_type": "nemotron_h",
        "num_layers": len(pattern),
        "linear": sizes if states else None,
        "linear_layers": states,
        "mlp_layers": mlps,
        "gated_mlp": False,
        "activation": "relu2",
        "rope": Rope(kind="none"),
    }


BESIDE_ATTENTION = {  # changes of `tiny_config`: every layer has both, as in Falcon-H1
    "model_type": "falcon_h1",
    "linear": Mamba2(2, 4, key_dim=8, value_dim=8, beside_attention=True, norm="none"),
    "linear_layers": (0, 1),
}

MIXTURES = {  # changes of `tiny_config`: a model of each family with experts
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_kv_heads": 4,
        "rope": Rope(
            kind="yarn", factor=4.0, original_max_positions=128, mscale=0.7, mscale_all_dim=1.2
        ),
        "mla": MLA(
            q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8
        ),
        "moe": MoE(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=8,
            shared_experts=1,
            scoring="sigmoid",
            normalise=True,
            scale=1.5,
            groups=4,
            groups_kept=2,
            corrected=True,
            dense_layers=(0,),
        ),
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "qk_norm": True,
        "moe": MoE(num_experts=8, experts_per_token=2, intermediate_size=8, normalise=True),
    },
}

# Changes of `tiny_config`: indexers select 5 keys. The second layer shares those of the first. No
# layer has experts.
SPARSE = MIXTURES["deepseek_v3"] | {
    "model_type": "glm_moe_dsa",
    "num_layers": 3,
    "moe": replace(MIXTURES["deepseek_v3"]["moe"], dense_layers=(0, 1, 2)),
    "indexer": Indexer(heads=9, head_dim=6, topk=5, rope_interleaved=True, shared_layers=(1,)),
}

_WIDE = {"num_kv_heads": 1, "head_dim": 8, "rope": Rope(theta=300.0)}
# Changes of `tiny_config`: layers that differ in heads, sizes, RoPE and windows, or that read the
# entries of another layer.
LAYERED = {
    "differing": {
        "num_layers": 3,
        "sliding_window": 5,
        "windowed_layers": (0,),
        "layers": (Layer(), Layer(num_heads=2, **_WIDE), Layer(head_dim=6)),
    },
    "sharing": {
        "num_layers": 4,
        "sliding_window": 5,
        "windowed_layers": (0, 2),
        "layers": (
            Layer(),
            Layer(**_WIDE),
            Layer(num_heads=2, entries_of=0),
            Layer(entries_of=1, **_WIDE),
        ),
    },
}

HYBRID = {  # changes of `tiny_config`: two layers that keep a state, and one with attention
    "model_type": "qwen3_5_text",
    "num_layers": 3,
    "qk_norm": True,
    "norm_offset": 1.0,
    "gated_attention": True,
    "linear": LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    "linear_layers": (0, 2),
}

# One shape of every kind. Tests that share a target, a shape of draft and the shapes of prompts
# share compiled programs.
SHAPES = {
    "chain": Chain(3),
    "adaptive": Chain(3, stop_below=0.3),
    "static": StaticTree(((0,), (1,), (0, 0), (2,), (1, 0), (0, 1), (0, 0, 0))),
    "dynamic": DynamicTree(top_k=3, depth=3, nodes=9),
    "sampled": SampledTree((2, 2, 1)),
}


FEW_TOKENS = {
    "vocab_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
}
"""The smallest model, whose continuations can be counted: tests draw tens of thousands of rows."""


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


def outputs(result) -> list[list[int]]:
    """Return the prompt and output of each row, without padding."""
    return [
        row[:length].tolist() for row, length in zip(result.tokens, result.lengths, strict=True)
    ]


def save_tiny(directory: Path, eos_token_ids: tuple[int, ...] = (2,), **sizes) -> Path:
    """Save a checkpoint that compiles fast: random weights, and the embedded tokenizer."""
    tiny_target(vocab_size=3072, eos_token_ids=eos_token_ids, **sizes).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "target" / name, directory)
    return directory


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> tuple[str, str]:
    """Return the directories of a target of two layers and of a draft model of one."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_tiny(root / "target")), str(save_tiny(root / "draft", num_layers=1))


@pytest.fixture(scope="session")
def small_assets(tmp_path_factory) -> Path:
    """Return a folder of random checkpoints that are named as the embedded ones.

    They compile in a third of the time that those of `specjax.assets` take.
    """
    root = tmp_path_factory.mktemp("assets")
    save_tiny(root / "target", (0,), max_positions=1024)  # 0: the tokenizer's own end
    save_tiny(root / "draft", (0,), max_positions=1024, num_layers=1)
    target = Target.from_pretrained(root / "target")
    for name, drafter in (("eagle3", Eagle3), ("mtp", MTP)):
        drafter.init(target, jax.random.key(0)).save_pretrained(root / name)
    return root


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> tuple[str, str]:
    """Return two files: a certificate of 127.0.0.1, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    files = str(directory / "certificate.pem"), str(directory / "private.pem")
    subject_options = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    key_options = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-out",
        files[0],
        "-keyout",
    ]
    try:
        subprocess.run(
            ["openssl", "req", "-x509", *key_options, files[1], *subject_options],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("needs openssl, to make a certificate")
    return files


@pytest.fixture(params=["small", pytest.param("embedded", marks=pytest.mark.thorough)])
def either_assets(request, monkeypatch) -> None:
    """Run a test that does not depend on the models with small ones under the name "embedded".

    In the thorough tier it also runs with the embedded models themselves.
    """
    if request.param == "small":
        root = request.getfixturevalue("small_assets")
        monkeypatch.setattr(specjax.assets, "__file__", str(root / "__init__.py"))


class RealPair:
    """A trained target, a draft model with its vocabulary, and prompts from their domain."""

    def __init__(self, target: Path, draft: Path) -> None:
        from transformers import AutoTokenizer

        self.target_path, self.draft_path = target, draft
        self.target = Target.from_pretrained(target, dtype=np.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)

    def prompts(self, count: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``count`` prompts of many lengths, 2 to ``longest`` tokens, padded on the right.

        The lengths are returned beside the tokens.
        """
        texts = self._texts()
        lengths = np.linspace(2, longest, count).astype(int)
        tokens = np.zeros((count, longest), np.int32)
        for row, length in enumerate(lengths):
            tokens[row, :length] = self.tokenizer(texts[row % len(texts)])["input_ids"][:length]
        return tokens, lengths

    def _texts(self) -> list[str]:
        raise NotImplementedError


class EmbeddedPair(RealPair):
    def __init__(self) -> None:
        super().__init__(ASSETS / "target", ASSETS / "draft")

    def _texts(self) -> list[str]:
        texts = []
        for name in ("argparse.py", "dataclasses.py", "pathlib.py", "textwrap.py", "heapq.py"):
            source = (Path(sysconfig.get_path("stdlib")) / name).read_text()
            nodes = [
                node
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
            texts += [
                segment
                for node in nodes
                if len(segment := ast.get_source_segment(source, node) or "") > 600
            ]
        return texts


class StoriesPair(RealPair):
    def __init__(self) -> None:
        super().__init__(SHARED / "stories260k", SHARED / "llama2xs-279k")

    def _texts(self) -> list[str]:
        return [
            json.loads(line)["text"]
            for line in (SHARED / "tinystories.jsonl").read_text().splitlines()[:60]
        ]


REAL_PAIRS = [pytest.param(EmbeddedPair, id="embedded")]
if (SHARED / "stories260k").is_dir():
    REAL_PAIRS.append(pytest.param(StoriesPair, id="stories", marks=pytest.mark.thorough))
