"""Test drafters by name."""

import json

import jax
import pytest

from specjax.drafters import DraftModel, Eagle, Eagle3, EarlyExit, PromptLookup, registry
from specjax.drafters.registry import DraftingMethod, load_drafter
from specjax.drafts.names import parse_shape
from specjax.drafts.published import EAGLE_TREE
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree, complete_tree
from specjax.errors import InputError
from tests.conftest import tiny_config, tiny_target


def test_methods_without_a_checkpoint() -> None:
    target = tiny_config()
    assert load_drafter("prompt-lookup", None, target) == PromptLookup()
    assert load_drafter("prompt-lookup:5", Chain(2), target) == PromptLookup(
        max_ngram=5, draft=Chain(2)
    )
    assert load_drafter("early-exit:2", Chain(3), target) == EarlyExit(layers=2, draft=Chain(3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("draft")
    tiny_target(num_layers=1).save_pretrained(directory)
    return str(directory)


def test_a_checkpoint_named_or_recognised(checkpoint) -> None:
    for name in (checkpoint, f"draft-model:{checkpoint}"):
        drafter = load_drafter(name, Chain(2), tiny_config())
        assert isinstance(drafter, DraftModel)
        assert (drafter.model.config.num_layers, drafter.draft_shape) == (1, Chain(2))


def test_drafters_that_read_the_target_are_recognised_in_every_layout(tmp_path) -> None:
    target = tiny_target()
    Eagle.init(target, jax.random.key(0)).save_pretrained(tmp_path / "eagle")
    eagle3 = Eagle3.init(target, jax.random.key(0))
    eagle3.save_pretrained(tmp_path / "eagle3")
    eagle3.save_pretrained(tmp_path / "speculators", layout="speculators")
    for place, kind in (("eagle", Eagle), ("eagle3", Eagle3), ("speculators", Eagle3)):
        assert type(load_drafter(str(tmp_path / place), Chain(2), target.config)) is kind
    file = tmp_path / "eagle" / "config.json"
    published = {
        name: value
        for name, value in json.loads(file.read_text()).items()
        if name not in ("bias", "qkv_bias")
    }
    file.write_text(json.dumps(published))  # as SafeAILab's for Vicuna, which does not name EAGLE
    assert type(load_drafter(str(tmp_path / "eagle"), Chain(2), target.config)) is Eagle
    assert load_drafter(f"eagle3:{tmp_path / 'eagle3'}", None, target.config).draft == DynamicTree()


def test_a_new_method_is_one_line_in_the_table(monkeypatch, tmp_path, checkpoint) -> None:
    requested = []

    def make(request):
        requested.append(request.where)
        return PromptLookup(**request.draft_given)

    wizard = DraftingMethod(
        "wizard:DIRECTORY", make, recognises=lambda config, _: "wizard_layers" in config
    )
    monkeypatch.setattr(registry, "METHODS", {"wizard": wizard} | registry.METHODS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "wizard_layers": 2}))
    assert load_drafter(str(tmp_path), Chain(2), tiny_config()) == PromptLookup(draft=Chain(2))
    load_drafter("wizard:some/where", None, tiny_config())
    assert requested == [str(tmp_path), "some/where"]
    # The config.json of this checkpoint lacks the field.
    assert isinstance(load_drafter(checkpoint, Chain(2), tiny_config()), DraftModel)
    with pytest.raises(InputError, match="methods: wizard:DIRECTORY; prompt-lookup"):
        load_drafter("witch:3", None, tiny_config())


def test_a_checkpoint_that_no_method_knows(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(InputError, match="model_type='abacus'; draft models may be llama, llama4"):
        load_drafter(str(tmp_path), None, tiny_config())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "moa,tli:runs/best",
            "tli must be a whole number of at most nine digits; write moa:DIRECTORY",
        ),
        ("moa,tli=-1:runs/best", "tli must be a whole number"),
        ("moa,tli=one:runs/best", "tli must be a whole number"),
        ("moa,tli=1,tli=2:runs/best", "'tli=2' is given twice"),
        (
            "moa,tl=1:runs/best",
            (
                r"'tl=1' is no setting of moa; did you mean tli\?; write .* or"
                r" moa,tli=NUMBER:DIRECTORY"
            ),
        ),
        ("moa,:runs/best", "'' is no setting of moa"),
        (
            "eagle3,tli=1:runs/best",
            "'tli=1' is no setting of eagle3; write eagle3:DIRECTORY or eagle3:OWNER/NAME$",
        ),
        (
            "early-exit,layers=1:2",
            "'layers=1' is no setting of early-exit; write early-exit:LAYERS$",
        ),
        ("moa,tli=1:", "write moa:DIRECTORY"),
        ("moo,tli=1:runs/best", r"no method of that name, .*; did you mean moa\?"),
    ],
)
def test_settings_that_a_name_cannot_have_are_refused(name, message) -> None:
    with pytest.raises(InputError, match=message):
        registry.find(name)


def test_a_directory_may_have_commas_in_its_name(tmp_path) -> None:
    for place in ("moa,tli=1", "draft,new"):
        tiny_target(num_layers=1).save_pretrained(tmp_path / place)
        assert isinstance(load_drafter(str(tmp_path / place), Chain(2), tiny_config()), DraftModel)
    method, where, _ = registry.find("moa,tli=1:runs/a,b=c:d")
    assert (method.settings, where) == ({"tli": 1}, "runs/a,b=c:d")
    assert registry.METHODS["moa"].settings == {}


def test_shapes_by_name() -> None:
    assert parse_shape("chain:4") == Chain(4)
    assert parse_shape("chain:12,0.4") == Chain(12, stop_below=0.4)
    assert parse_shape("complete:2,1") == StaticTree(complete_tree((2, 1)))
    assert parse_shape("sampled:3,2") == SampledTree((3, 2))
    assert parse_shape("dynamic:4,5,16") == DynamicTree(4, 5, 16)
    assert parse_shape("eagle") == StaticTree(EAGLE_TREE)
