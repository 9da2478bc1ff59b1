"""Check what error messages suggest."""

import pytest

from specjax import config
from specjax.drafters.registry import find
from specjax.drafts.names import as_shape
from specjax.errors import InputError, check_options, did_you_mean
from specjax.models.config_json import parse_config
from specjax.pipeline import settings
from specjax.training.config import TrainConfig


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("temp", "temperature"),
        ("temprature", "temperature"),
        ("Top-K", "top_k"),
        ("stops", "stop"),
        ("seeds", "seed"),
    ],
)
def test_the_nearest_name_is_suggested(word, nearest) -> None:
    assert (
        did_you_mean(word, ("stop", "seed", "top_k", "top_p", "temperature"))
        == f"; did you mean {nearest}?"
    )


@pytest.mark.parametrize("word", ["", "x", "bush", "\ud800"])
def test_nothing_is_suggested_where_nothing_is_near(word) -> None:
    assert did_you_mean(word, ("stop", "seed", "temperature")) == ""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_tokens", "max_new_tokens"),
        ("stop_token_ids", "eos_token_ids"),
        ("stop_strings", "stop"),
    ],
)
def test_other_libraries_names_are_told_from_ours(theirs, ours) -> None:
    with pytest.raises(
        InputError,
        match=f"{theirs}=8: generate has no argument of that name; did you mean {ours}[?]",
    ):
        check_options("generate", {theirs: 8}, settings, "stop")


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(
        InputError,
        match="zzz=1: generate has no argument of that name; its arguments are max_new_tokens, ",
    ):
        check_options("generate", {"zzz": 1}, settings)


@pytest.mark.parametrize(
    ("parse", "nearest"),
    [
        (lambda: find("prompt-lokup"), "prompt-lookup"),
        (lambda: find("egle3:somewhere"), "eagle3"),
        (lambda: find("embeded:eagle3"), "embedded"),
        (lambda: as_shape("chian:4"), "chain"),
        (lambda: as_shape("dynmic"), "dynamic"),
        (lambda: parse_config({"model_type": "quen3"}), "qwen3"),
        (lambda: config.parse(TrainConfig, {"stpes": 3}, "file"), "steps"),
        (lambda: config.parse(TrainConfig, {"method": {"name": "eagel3"}}, "file"), "eagle3"),
    ],
)
def test_mistyped_drafters_drafts_families_and_keys_are_told_the_nearest(parse, nearest) -> None:
    with pytest.raises(InputError, match=f"did you mean {nearest}[?]"):
        parse()
