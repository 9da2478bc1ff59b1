"""Check the variables of the chat template that stand beside a drafter, and the warning of them."""

import json
import warnings
from pathlib import Path

import jax
import pytest

import specjax
from specjax.cli.main import main
from specjax.drafters import chat_variables
from specjax.drafters.registry import load_drafter
from specjax.models import hub
from specjax.models.fields import CheckpointError
from specjax.templates import with_template
from specjax.text import load_tokenizer
from tests.conftest import ASSETS, save_tiny, tiny_target

TEMPLATE = "{{ messages[0].content }}{% if thinks | default(true) %}<think>{% endif %}"
THOUGHTLESS = {"thinks": False}


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=3072)


@pytest.fixture
def drafter(target, tmp_path) -> Path:
    directory = tmp_path / "medusa"
    specjax.Medusa.init(target, jax.random.key(1), heads=2, draft=2).save_pretrained(directory)
    return directory


@pytest.fixture
def tokenizer():
    plain = load_tokenizer(ASSETS / "target")
    plain.chat_template = TEMPLATE
    return plain


def warnings_of(name: str, target, tokenizer) -> list[str]:
    """Return the warnings of a load."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_drafter(name, None, target.config, tokenizer=tokenizer)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("method", ["", "medusa:"])
def test_a_drafter_of_other_variables_is_loaded_with_one_warning_that_names_both(
    drafter, target, tokenizer, method
) -> None:
    chat_variables.write(drafter, THOUGHTLESS)
    name = f"{method}{drafter}"
    (warning,) = warnings_of(name, target, with_template(tokenizer, settings={"thinks": True}))
    assert warning == (
        f"drafter={name!r}: it was trained on chats with"
        ' chat_template_kwargs={"thinks": false}, and chats have chat_template_kwargs='
        '{"thinks": true} here: it drafts them less well; give the same variables'
    )
    assert len(warnings_of(name, target, tokenizer)) == 1
    assert not warnings_of(name, target, with_template(tokenizer, settings=THOUGHTLESS))


def test_there_is_no_warning_where_both_make_the_same_of_a_chat(drafter, target, tokenizer) -> None:
    assert not warnings_of(str(drafter), target, with_template(tokenizer, settings=THOUGHTLESS))
    chat_variables.write(drafter, {"thinks": True})
    assert not warnings_of(str(drafter), target, tokenizer)
    chat_variables.write(drafter, THOUGHTLESS)
    assert warnings_of(str(drafter), target, tokenizer)
    tokenizer.chat_template = None
    assert not warnings_of(str(drafter), target, tokenizer)
    assert not warnings_of(str(drafter), target, None)


def test_a_draft_model_has_variables_too(tmp_path, target, tokenizer) -> None:
    directory = save_tiny(tmp_path / "draft", num_layers=1)
    chat_variables.write(directory, THOUGHTLESS)
    assert len(warnings_of(str(directory), target, tokenizer)) == 1
    assert len(warnings_of(f"draft-model:{directory}", target, tokenizer)) == 1


def test_a_damaged_record_is_refused_by_its_name(drafter) -> None:
    (drafter / chat_variables.FILE).write_text('{"chat_template_kwargs": ["thinks"]}')
    with pytest.raises(CheckpointError, match=r"trained_with\.json: chat_template_kwargs=.*object"):
        chat_variables.read(hub.open_checkpoint(drafter))


def test_a_converted_drafter_has_the_variables_of_its_source(target, tmp_path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    specjax.Eagle3.init(target, jax.random.key(1), draft=2).save_pretrained(source)
    chat_variables.write(source, THOUGHTLESS)
    assert main(["convert", "--drafter", str(source), "--output", str(output)]) == 0
    assert json.loads((output / chat_variables.FILE).read_text()) == {
        "chat_template_kwargs": THOUGHTLESS
    }
