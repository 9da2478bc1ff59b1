"""The sampling parameters of generation_config.json are read as transformers reads them."""

import json
import random

import numpy as np
import pytest
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from specjax.errors import InputError
from specjax.models.generation_config import FILE, GenerationDefaults, parse_defaults, read_defaults
from specjax.sampling import Sampling
from tests.models.test_checkpoint_fuzz import change_json

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
GEMMA3 = {
    "cache_implementation": "hybrid",
    "do_sample": True,
    "eos_token_id": [1, 106],
    "top_k": 64,
    "top_p": 0.95,
}
QWEN25 = QWEN3 | {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
LLAMA31_BASE = {
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
}


@pytest.mark.parametrize(
    ("raw", "sampling"),
    [
        (QWEN3, Sampling(0.6, 20, 0.95)),
        (GEMMA3, Sampling(1.0, 64, 0.95)),
        (LLAMA31_BASE, Sampling(0.6, 0, 0.9)),  # and not the 50 likeliest tokens
        ({"do_sample": True}, Sampling(1.0)),
        (
            {"do_sample": True, "min_p": 0.1, "temperature": None, "top_k": None, "top_p": None},
            Sampling(1.0, min_p=0.1),
        ),
        ({"do_sample": True, "top_k": -1}, Sampling(1.0)),
        ({"do_sample": True, "top_k": 0, "temperature": 2}, Sampling(2.0)),
        ({"do_sample": True, "top_k": 20.0}, Sampling(1.0, 20)),
        ({"do_sample": True, "temperature": 0, "top_k": 5}, Sampling(0.0, 5)),
        (QWEN3 | {"do_sample": False}, None),
        (QWEN3 | {"do_sample": None}, None),
        ({"temperature": 0.6, "top_k": 20}, None),
        ({"eos_token_id": 3}, None),
        ({}, None),
    ],
)
def test_fields_are_in_force_with_do_sample_alone(raw, sampling) -> None:
    defaults = parse_defaults(raw)
    assert defaults.sampling == sampling
    assert not defaults.not_applied
    is_sampled = GenerationConfig(**raw).get_generation_mode() == GenerationMode.SAMPLE
    assert is_sampled == (sampling is not None)
    assert defaults.sampling is None or type(defaults.sampling.top_k) is int


BAD = {
    "do_sample": ("yes", 1, "true", []),
    "temperature": ("hot", -1, float("nan"), float("inf"), True, [0.7], {}, 1e39),
    "top_k": ("20", -2, 20.5, float("nan"), float("inf"), True, [20], 2**31),
    "top_p": ("0.9", 0, 0.0, 2, 1.01, -0.5, float("nan"), True, [0.9]),
    "min_p": ("0.1", -0.1, 1.5, float("nan"), False, [0.1]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_with_file_field_value_and_remedy(name, tmp_path) -> None:
    for value in BAD[name]:
        (tmp_path / FILE).write_text(json.dumps({"do_sample": True} | {name: value}))
        with pytest.raises(InputError) as refused:
            read_defaults(tmp_path)
        message = str(refused.value)
        assert message.startswith(f"{tmp_path / FILE}: {name}={value!r}: must be ")
        assert "generation_config=None, --generation-config none" in message
        if name != "do_sample":  # without sampling nobody reads the field
            assert parse_defaults({"do_sample": False} | {name: value}).sampling is None


@pytest.mark.parametrize("content", ["[]", "{", "", "3"])
def test_a_damaged_file_is_refused_by_name(content, tmp_path) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(
        InputError,
        match=r"generation_config\.json (is not valid JSON|must hold a JSON object).*download it",
    ):
        read_defaults(tmp_path)


def test_without_a_file_nothing_is_stated(tmp_path) -> None:
    assert read_defaults(tmp_path) == GenerationDefaults(sampling=None, not_applied={})


def test_a_damaged_file_gives_settings_that_can_be_drawn_with_or_is_refused_in_a_line(
    tmp_path,
) -> None:
    content = json.dumps(QWEN25 | {"min_p": 0.01, "suppress_tokens": [3]}).encode()
    read, refused = 0, 0
    for case in range(250):
        (tmp_path / FILE).write_bytes(change_json(random.Random(case), content))
        try:
            defaults = read_defaults(tmp_path)
        except InputError as error:
            assert str(error).startswith(str(tmp_path / FILE)) and "\n" not in str(error)
            refused += 1
            continue
        read += 1
        assert "\n" not in defaults.describe_not_applied()
        if defaults.sampling is not None:
            assert np.isfinite(defaults.sampling.rows(1).temperature).all()
    assert read > 50 and refused > 50


CHANGES = {
    "presence_penalty": 1.5,
    "frequency_penalty": 0.1,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "bad_words_ids": [[3]],
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [7],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [10, 1.2],
    "sequence_bias": [[[3], 1.0]],
    "guidance_scale": 1.5,
    "min_length": 4,
    "min_new_tokens": 4,
    "stop_strings": ["\n"],
}
DRAWN = {"typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "top_h": 0.4}


@pytest.mark.parametrize(("name", "value"), [*CHANGES.items(), *DRAWN.items()])
def test_a_field_that_would_change_the_text_is_named(name, value) -> None:
    for is_drawn in (True, False):
        expected = {name: value} if is_drawn or name in CHANGES else {}
        defaults = parse_defaults({"do_sample": is_drawn, name: value})
        assert defaults.not_applied == expected
        assert defaults.describe_not_applied() == (f"{name} {value!r}" if expected else "")
    assert not parse_defaults({"do_sample": True, name: None}).not_applied


def test_a_repetition_penalty_applies_where_tokens_are_drawn() -> None:
    sampled = parse_defaults({"do_sample": True, "repetition_penalty": 1.05})
    assert sampled.sampling == Sampling(1.0, repetition_penalty=1.05)
    assert not sampled.not_applied
    greedy = parse_defaults({"do_sample": False, "repetition_penalty": 1.05})
    assert greedy.sampling is None
    assert greedy.not_applied == {"repetition_penalty": 1.05}


def test_values_that_change_nothing_are_not_named() -> None:
    """Transformers' values for absent fields change nothing.

    Its older versions wrote them into every file.
    """
    usual = GenerationConfig._get_default_generation_params()
    usual |= {
        "max_new_tokens": 2048,
        "max_length": 4096,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "use_cache": True,
    }
    usual |= {"do_sample": True, "suppress_tokens": [], "bad_words_ids": [], "guidance_scale": 1}
    defaults = parse_defaults(usual)
    assert defaults.sampling == Sampling(1.0, 50) and not defaults.not_applied


def test_every_field_of_transformers_that_would_change_the_text_is_known() -> None:
    """A new field of transformers must be listed here as harmless, or be recognized."""
    harmless = set()
    for names in (
        (
            "max_length",
            "max_new_tokens",
            "early_stopping",
            "max_time",
            "length_penalty",
            "num_return_sequences",
        ),
        (
            "use_cache",
            "cache_implementation",
            "cache_config",
            "max_cache_len",
            "prefill_chunk_size",
        ),
        (
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
            "low_memory",
            "use_mtp",
        ),
        # These concern a distribution, and NaN, which is an error here.
        ("renormalize_logits", "remove_invalid_values"),
        (
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "output_logits",
            "return_dict_in_generate",
        ),
        ("pad_token_id", "bos_token_id", "eos_token_id", "transformers_version"),
        # These concern encoders.
        (
            "encoder_no_repeat_ngram_size",
            "encoder_repetition_penalty",
            "decoder_start_token_id",
        ),
        (
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
        ),
        (
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
            "assistant_early_exit",
            "assistant_lookbehind",
        ),
        ("target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
    ):
        harmless |= set(names)
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - harmless
    theirs -= {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    unknown = [
        name
        for name in sorted(theirs)
        if not parse_defaults({"do_sample": True, name: ["some"]}).not_applied
    ]
    assert not unknown
