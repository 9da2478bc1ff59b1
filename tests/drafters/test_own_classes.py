"""Test drafters of other packages, named by their class or by an entry point.

The file also tests the messages for drafters that break a rule.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax.decoding import rows
from specjax.drafters import Draft, Drafter, TrainedDrafter, registry
from specjax.drafters.registry import find, load_drafter
from specjax.errors import InputError
from tests.conftest import tiny_config, tiny_target
from tests.drafters.test_new_drafter import Wizard

CLASS = "tests.drafters.test_new_drafter:Wizard"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    Wizard.init(tiny_target(), jax.random.key(3)).save_pretrained(tmp_path / "wizard", target="t")
    return tmp_path / "wizard"


def install(monkeypatch, folder: Path, points: str, **modules: str) -> None:
    """Put a package with these entry points and modules on the import path."""
    info = folder / "magic-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: magic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[specjax.drafters]\n{points}\n")
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))


def test_a_class_that_can_be_imported_is_named_with_its_checkpoint(checkpoint) -> None:
    drafter = load_drafter(f"{CLASS}@{checkpoint}", "chain:2", tiny_config(), jnp.float32)
    assert isinstance(drafter, Wizard) and drafter.draft == specjax.Chain(2)
    method, where, _ = find(f"{CLASS}@{checkpoint}")
    assert (method.trained, where) == (Wizard, str(checkpoint))


def test_without_its_class_a_checkpoint_names_the_remedy(checkpoint) -> None:
    with pytest.raises(
        InputError, match=f"if a package has its class, write package.module:Class@{checkpoint}"
    ):
        load_drafter(str(checkpoint), None, tiny_config())
    with pytest.raises(
        InputError, match=r"package\.module:Class@DIRECTORY for a class of your own"
    ):
        load_drafter("wizard", None, tiny_config())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "not.a_module:Wizard@x",
            r"not\.a_module cannot be imported \(ModuleNotFoundError: .*PYTHONPATH",
        ),
        ("tests.drafters.test_new_drafter:Wizzard@x", "has no Wizzard; did you mean [Ww]izard[?]"),
        (
            "tests.drafters.test_new_drafter:WizardConfig@x",
            "give a subclass of specjax.drafters.TrainedDrafter",
        ),
        (
            "tests.drafters.test_new_drafter:json@x",
            "give a subclass of specjax.drafters.TrainedDrafter",
        ),
        (f"{CLASS}@./nothing", "'./nothing' is not a directory"),
    ],
)
def test_what_is_wrong_with_such_a_name_is_said(name, message) -> None:
    with pytest.raises(InputError, match=message):
        load_drafter(name, None, tiny_config())


def test_code_beside_a_checkpoint_is_not_run(checkpoint, monkeypatch) -> None:
    """Check modules in the checkpoint's directory, and modules that config.json names.

    transformers would run the latter as remote code.
    """
    for name in ("modeling.py", "__init__.py", "config.py"):
        (checkpoint / name).write_text("raise SystemExit('it was run')")
    file = checkpoint / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoModel": "modeling.Wizard"}})
    )
    with pytest.raises(InputError, match="belongs to no known method"):
        load_drafter(str(checkpoint), None, tiny_config())
    assert isinstance(
        load_drafter(f"{CLASS}@{checkpoint}", None, tiny_config(), jnp.float32), Wizard
    )


def test_an_entry_point_is_a_method_and_recognises_its_checkpoints(
    checkpoint, monkeypatch, tmp_path
) -> None:
    install(monkeypatch, tmp_path / "site", f"wizard = {CLASS}")
    for name in (f"wizard:{checkpoint}", str(checkpoint)):
        assert isinstance(load_drafter(name, None, tiny_config(), jnp.float32), Wizard)
    with pytest.raises(InputError, match="write wizard:DIRECTORY or wizard:OWNER/NAME"):
        load_drafter("wizard", None, tiny_config())
    with pytest.raises(InputError, match=r"did you mean wizard[?]; methods: .*; wizard:DIRECTORY;"):
        load_drafter("wizzard", None, tiny_config())
    file = checkpoint / "config.json"  # the drafter's fields are checked before a model's
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    assert isinstance(load_drafter(str(checkpoint), None, tiny_config(), jnp.float32), Wizard)


def test_an_entry_point_may_be_a_method_as_the_library_has_them(monkeypatch, tmp_path) -> None:
    code = "from specjax.drafters.registry import DraftingMethod\nfrom specjax import EarlyExit\n"
    code += "method = DraftingMethod('one-layer', lambda request: EarlyExit(layers=1))"
    install(monkeypatch, tmp_path, "one-layer = of_magic:method", of_magic=code)
    assert load_drafter("one-layer", None, tiny_config()) == specjax.EarlyExit(layers=1)


def test_a_package_that_is_broken_is_named_and_does_not_keep_others_from_working(
    checkpoint, monkeypatch, tmp_path
) -> None:
    install(
        monkeypatch,
        tmp_path / "site",
        f"broken = broken_magic:Magic\nwizard = {CLASS}",
        broken_magic="1 / 0",
    )
    with pytest.raises(
        InputError,
        match=r"broken_magic:Magic, of the entry points .* \(ZeroDivisionError: division by zero\)",
    ):
        load_drafter("broken:x", None, tiny_config())
    assert isinstance(load_drafter(str(checkpoint), None, tiny_config(), jnp.float32), Wizard)


def test_the_librarys_own_methods_cannot_be_replaced(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, "prompt-lookup = broken_magic:Magic")
    assert load_drafter("prompt-lookup", None, tiny_config()) == specjax.PromptLookup()
    assert registry._entry_points() == {}


@pytest.mark.thorough
def test_the_command_line_takes_a_class(tmp_path, tiny_pair) -> None:
    target = specjax.Target.from_pretrained(tiny_pair[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "drafters.py").write_text(
        "import specjax\nfrom flax import struct\n\n\n"
        "@struct.dataclass\nclass Mine(specjax.Eagle3):\n    pass\n"
    )
    specjax.Eagle3.init(target, jax.random.key(3)).save_pretrained(tmp_path / "drafter", target="t")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "specjax", "generate", "--target", tiny_pair[0]]
    command += ["--prompt", "x", "--max-new-tokens", "4"]
    texts = []
    for drafter in ("none", f"mine.drafters:Mine@{tmp_path / 'drafter'}"):
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            [*command, "--drafter", drafter],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]


# --- drafters that break a rule ---


@struct.dataclass
class Right(Drafter):
    draft: specjax.Chain = struct.field(pytree_node=False, default=specjax.Chain(2))

    def propose(self, target, state, root, sampling, keys, active):
        return Draft.chain(root, jnp.repeat(root[:, None], self.draft_shape.depth, axis=1)), state


@struct.dataclass
class WithoutRows(Right):
    def start(self, target, batch, capacity):
        return {"seen": jnp.zeros((batch, 3)), "number": jnp.zeros(())}


@struct.dataclass
class RowsLast(Right):
    def start(self, target, batch, capacity):
        return jnp.zeros((5, batch))


@struct.dataclass
class Floats(Right):
    def propose(self, target, state, root, sampling, keys, active):
        return Draft.chain(root.astype(jnp.float32), jnp.zeros((root.shape[0], 2))), state


@struct.dataclass
class Deep(Right):
    def propose(self, target, state, root, sampling, keys, active):
        return Draft.chain(root, jnp.repeat(root[:, None], 3, axis=1)), state


@struct.dataclass
class OneRow(Right):
    def propose(self, target, state, root, sampling, keys, active):
        return Draft.chain(root[:1], root[:1, None]), state


@struct.dataclass
class Alone(Right):
    def propose(self, target, state, root, sampling, keys, active):
        return Draft.chain(root, root[:, None])


class Undecorated(Right):
    pass


BROKEN = {
    Undecorated: r"is no pytree: decorate its class with flax.struct.dataclass",
    WithoutRows: (
        r"start\(\)\['number'\] has shape \[\]: each array of the state must have rows first"
    ),
    RowsLast: r"start\(\) has shape \[5, 2\]: each array of the state must have rows first",
    Floats: r"drafts tokens of type float32: token ids must be integers",
    Deep: r"drafts 3 deep, but draft=Chain.*: drafts must have that depth",
    OneRow: r"drafts tokens \[1, 2\]: they must be \[B, N\], with B=2",
    Alone: r"propose\(\) returns Draft: return a Draft and the state",
}


@pytest.mark.full
@pytest.mark.thorough_except("Undecorated", "WithoutRows", "RowsLast")
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_drafter_that_breaks_a_rule_is_told_the_rule_and_the_page(kind) -> None:
    with pytest.raises(
        InputError, match=rf"^{kind.__name__}: .*{BROKEN[kind]}.* \(see docs/extend/drafter.md\)"
    ):
        specjax.generate(tiny_target(), kind(), np.array([[1, 2], [3, 4]]), max_new_tokens=4)


def test_an_engine_tells_the_same_of_a_state() -> None:
    with pytest.raises(InputError, match="each array of the state must have rows first"):
        rows.empty(tiny_target(), RowsLast(), rows=2, capacity=32, pages=16, page=8)


def test_a_drafter_without_the_field_draft_is_refused_when_it_is_made() -> None:
    @struct.dataclass
    class Shapeless(Drafter):
        size: int = 3

    with pytest.raises(
        InputError,
        match=r"^Shapeless: the class has no field draft, .* \(see docs/extend/drafter.md\)",
    ):
        Shapeless()


def test_the_page_that_errors_name_exists() -> None:
    page = Path(specjax.__file__).parents[1] / registry.RULES_PAGE
    assert page.is_file()
    assert TrainedDrafter.__name__ in page.read_text()
