"""Every field of config.json, changed one at a time, is read as transformers reads it."""

import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from specjax.models.config_json import parse_config
from specjax.models.families import FAMILIES
from specjax.models.fields import CheckpointError
from tests.models.families import every_field, zoo
from tests.models.families.every_field import ABSENT, LENGTH, ROPES, Case, Outcome, outcome

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_YARN = {name: value for name, value in ROPES["yarn"].items() if name != "rope_theta"}
# Cases that were once read otherwise, and their outcomes today.
MEASURED = [
    *[
        (Case("llama", kind, "original_max_position_embeddings", 24), "equal")
        for kind in ("yarn", "llama3")
    ],
    (Case("llama", "default", "rope_scaling", _YARN), "equal"),
    (Case("qwen3", "linear", "rope_scaling", _YARN), "equal"),
    (Case("llama", "yarn", "rope_parameters.original_max_position_embeddings", 4), "equal"),
    (Case("llama", "yarn whose bounds are cut", "rope_theta", ABSENT), "no change"),
    *[
        (Case(family, "", "layer_types", kinds), "no change")
        for family in ("phi3", "mistral", "ministral3", "qwen3_moe")
        for kinds in ([_FULL, _FULL], [_WINDOWED, _FULL])
    ],
    (Case("gemma3_text", "", "attn_logit_softcapping", 2.0), "no change"),
    (Case("olmo3", "", "rope_theta", 1e4), "refused"),
    (Case("olmo3", "yarn", "rope_parameters.truncate", False), "refused"),
    (Case("llama", "", "partial_rotary_factor", 0.5), "no change"),
    *[
        (Case("llama", "", "hidden_act", name), "equal")
        for name in ("gelu", "gelu_pytorch_tanh", "gelu_new")
    ],
    (Case("llama", "dynamic", "rope_theta", ABSENT), "no change"),
    (Case("smollm3", "", "layer_types", [_FULL, _FULL]), "equal"),
    (Case("smollm3", "", "sliding_window", 3), "equal"),
    (Case("muse_glimmer", "", "hidden_act", "gelu"), "no change"),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "expected"), MEASURED, ids=str)
def test_what_was_read_otherwise_once(case, expected) -> None:
    result = outcome(case)
    assert not result.wrong and result.summary.startswith(expected), result.summary


# The only cases with errors above `TOLERANCE`, all of them below twice transformers' own.
BY_ROUNDING: set[str] = set()


# Cases that are read otherwise on purpose: transformers raises the steps of prompts to
# time_step_min, but not those of decoding. So the next token would depend on how a text was read.
OTHERWISE = {
    f"{family}: time_step_min=left out" for family in ("nemotron_h", "nemotron_h with an mlp")
}


def check(cases: list[Case]) -> list[Outcome]:
    """Print the outcome of each case and return it, and fail if ours is another model."""
    results = {}
    for case in cases:
        results[str(case)] = result = outcome(case)
        print(f"{case} -> {result.summary}")
    kinds = Counter(re.split("[:,]", result.summary)[0] for result in results.values())
    print(f"{len(cases)} files: {dict(kinds)}")
    rounded = {name for name, result in results.items() if result.is_rounding}
    print(f"accepted as rounding: {sorted(rounded)}")
    wrong = {name: result.summary for name, result in results.items() if result.wrong}
    assert wrong.keys() == OTHERWISE & results.keys(), wrong
    assert rounded <= BY_ROUNDING
    assert kinds["equal"] > len(cases) // 10  # not all cases are refused
    return list(results.values())


@pytest.mark.full
def test_the_table_has_every_family_and_the_fields_that_are_known_to_matter() -> None:
    names = {FAMILIES[family.split(maxsplit=1)[0]].model_type for family in every_field.FAMILIES}
    assert names == {family.model_type for family in FAMILIES.values()}
    for family in every_field.FAMILIES.keys() - every_field.WITH_ANOTHER_SWITCH:
        fields = {case.name for case in every_field.cases_of(family)}
        epsilons = fields & {"rms_norm_eps", "layer_norm_epsilon", "norm_eps", "post_norm_eps"}
        assert epsilons
        # 1.5 times 1e-6 would be 1e-6 to a reader that ignores the field.
        assert all(max(every_field.arguments(family)[name]) >= 0.05 for name in epsilons)
        assert {
            "rope_parameters.factor",
            "rope_scaling",
            "layer_types",
            "tie_word_embeddings",
        } <= fields


@pytest.mark.parametrize(
    ("error", "rounding", "wrong"),
    [
        (5e-5, 0.0, False),
        (1.5e-4, 1e-5, True),
        (1.5e-4, 1e-4, False),
        (1.5e-3, 1e-3, False),
        (2.5e-3, 1.0, True),
        (math.nan, 1.0, True),
    ],
)
def test_an_error_is_accepted_as_rounding_up_to_a_limit(
    monkeypatch, error, rounding, wrong
) -> None:
    logits = np.zeros((1, LENGTH, 3))
    model = SimpleNamespace(
        double=lambda: model,
        set_experts_implementation=lambda name: None,
        config=SimpleNamespace(get_text_config=SimpleNamespace),
    )
    monkeypatch.setattr(every_field, "_ours", lambda model, fields: logits + error)
    monkeypatch.setattr(zoo, "logits", lambda model, tokens: logits + rounding)
    closed = [np.zeros((1, LENGTH), bool)]
    monkeypatch.setattr(zoo, "open_selections", lambda model, tokens: closed)
    theirs = every_field.Theirs(model, logits[..., 0], logits)
    result = every_field.compare(theirs, {})
    assert result.wrong == wrong
    assert result.is_rounding == (error > every_field.TOLERANCE and not wrong)
    assert result.compared_tokens == LENGTH


@pytest.mark.parametrize(
    ("of_each_case", "expected"),
    [
        ({1: (True, None), 2: (True, 0.5)}, True),  # all are refused
        ({1: (True, None), 2: (False, 0.0)}, False),
        ({1: (True, 0.5), 2: (False, 5e-4)}, False),  # an error could be as large
        ({1: (True, 0.5), 2: (False, 5e-3)}, True),
        ({1: (False, None), 2: (False, None)}, False),
    ],
)
def test_a_refusal_is_an_effect_only_if_no_file_is_read(
    monkeypatch, of_each_case, expected
) -> None:
    cases = [Case("llama", "", "field", value) for value in of_each_case]
    monkeypatch.setattr(every_field, "cases_of", lambda family: cases)
    monkeypatch.setattr(every_field, "_is_refused", lambda case: of_each_case[case.value][0])
    monkeypatch.setattr(every_field, "_change", lambda case: of_each_case[case.value][1])
    assert every_field.has_effect("llama", "field") == expected


# Fields that transformers' modeling code reads and no case changes. By name the reason, and the
# classes of configurations: a new class has no exceptions.
NOT_CHANGED: dict[str, tuple[str, str]] = {
    "kv_sharing_modes": ("derived from num_kv_shared_layers", "Gemma4Text"),
    "output_attentions": ("another output", "Llama4Text"),
    "num_hidden_layers": ("derived from layers_block_type", "NemotronH"),
    "num_nextn_predict_layers": ("MTP modules, which are no part of the target", "Step3p7"),
}

# Fields that no case changes with an effect: no file that both sides read changes transformers'
# logits by more than `every_field.EFFECT`. By name the reason, and the classes of configurations.
WITHOUT_EFFECT: dict[str, tuple[str, str]] = {
    "attention_dropout": (
        "in training alone",
        "Llama Mistral Ministral3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5Text Qwen3_5MoeText "
        "DeepseekV3 DeepseekV32 GlmMoeDsa Gemma2 Gemma3Text Gemma4Text GptOss Olmo3 Phi3 "
        "SmolLM3 Granite SeedOss Llama4Text Mixtral Glm4 Glm4Moe MiniMaxM2 Glm4MoeLite "
        "HunYuanDenseV1 HunYuanMoEV1 Exaone4 MiMoV2Flash NemotronH GraniteMoeHybrid Bamba "
        "FalconH1 OlmoHybrid KimiLinear Step3p7 MuseGlimmer Qwen3VL Qwen3VLMoe",
    ),
    "resid_pdrop": ("in training alone", "Phi3"),
    "residual_dropout": ("in training alone", "SeedOss"),
    "router_jitter_noise": ("in training alone", "Mixtral MiniMaxM2"),
    "router_aux_loss_coef": (
        "a loss",
        "Qwen3Moe Qwen3Next Qwen3_5MoeText GptOss Mixtral MiniMaxM2 Ernie4_5_Moe "
        "GraniteMoeHybrid Qwen3VLMoe",
    ),
    "z_loss_coefficient": ("a loss", "Bamba"),
    "linear_dt_init_floor": ("for new models", "OlmoHybrid"),
    "max_position_embeddings": (
        "the longest text, after which dynamic RoPEs change",
        "Llama Mistral Ministral3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5Text Qwen3_5MoeText "
        "DeepseekV3 DeepseekV32 GlmMoeDsa Gemma2 Gemma3Text Gemma4Text GptOss Olmo3 SmolLM3 "
        "Granite SeedOss Llama4Text Mixtral Glm4 Glm4Moe MiniMaxM2 Ernie4_5 Ernie4_5_Moe "
        "Glm4MoeLite HunYuanDenseV1 HunYuanMoEV1 Exaone4 MiMoV2Flash GraniteMoeHybrid Bamba "
        "FalconH1 Lfm2 Lfm2Moe OlmoHybrid Step3p7 MuseGlimmer Qwen3VL Qwen3VLMoe Phi3",
    ),
    "output_router_logits": (
        "another output",
        "Qwen3Moe Qwen3Next Qwen3_5MoeText GptOss Mixtral MiniMaxM2 Ernie4_5_Moe "
        "GraniteMoeHybrid Qwen3VLMoe",
    ),
    "output_hidden_states": ("another output", "Llama4Text"),
    "return_dict": ("the type of the output", "Llama4Text"),
    "num_logits_to_keep": ("how many logits generation computes", "NemotronH Bamba FalconH1"),
    "use_mamba_kernels": ("how states are computed", "NemotronH"),
    "head_dim": ("replaced by qk_rope_head_dim", "DeepseekV3 DeepseekV32 GlmMoeDsa Kimi_K25"),
    "attn_logit_softcapping": ("read, and not used", "Gemma3Text"),
    "layer_types": (
        "replaced by what attn_layer_indices says, or by layers that are all alike",
        "Bamba FalconH1",
    ),
    "layers_block_type": ("derived from attn_layer_indices", "Bamba"),
    "hidden_act": (
        "swish is silu, and all others are refused",
        "Qwen3Next Qwen3_5Text Qwen3_5MoeText GraniteMoeHybrid Bamba FalconH1 OlmoHybrid "
        "KimiLinear Step3p7",
    ),
    "chunk_size": ("how states are computed: rounding alone", "NemotronH"),
    "mamba_chunk_size": (
        "how states are computed: rounding alone",
        "GraniteMoeHybrid Bamba FalconH1",
    ),
    "time_step_floor": ("for new models", "NemotronH"),
    "mamba_d_ssm": ("any but the heads times their size is refused", "FalconH1"),
    "mamba_expand": ("replaced by mamba_d_ssm", "FalconH1"),
    "num_key_value_heads": (
        "any but the number of heads is refused, and null is that",
        "DeepseekV3 KimiLinear",
    ),
    "use_bidirectional_attention": (
        "refused where it would change a text",
        "Gemma3Text Gemma4Text",
    ),
    "original_max_position_embeddings": ("refused beside a RoPE that has it", "Phi3"),
    "moe_norm_min": ("refused where it would be seen, from 1e-6 on", "Ernie4_5_Moe"),
    "gating": ("with other gates than those of heads transformers fails", "Step3p7"),
    "num_local_experts": ("another name of n_routed_experts, which the file has", "Step3p7"),
}


def fields_by_class(table: dict[str, tuple[str, str]]) -> dict[str, set[str]]:
    """Return the fields of a table for each class that has some."""
    classes = {name for _, names in table.values() for name in names.split()}
    return {
        kind: {name for name, (_, names) in table.items() if kind in names.split()}
        for kind in classes
    }


@pytest.mark.full
def test_every_field_that_transformers_reads_is_changed() -> None:
    """Read the modeling code: fields of the configuration class that it reads as ``config.NAME``.

    Those that masks and RoPEs read in other files are not seen.
    """
    unchanged = {}
    for kind, examples in every_field.examples_by_class().items():
        read = every_field.fields_read_by_class(kind)
        assert {"hidden_size", "vocab_size"} <= read
        # The keys of an object are changed one at a time.
        changed = {
            case.name.partition(".")[0]
            for example in examples
            for case in every_field.cases_of(example)
        }
        if missing := read - changed:
            unchanged[kind] = missing
    assert unchanged == fields_by_class(NOT_CHANGED)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", every_field.examples_by_class())
def test_every_field_that_transformers_reads_has_an_effect_in_some_case(kind) -> None:
    """A field that changes nothing in any case may be read in another way, or not at all."""
    examples = every_field.examples_by_class()[kind]
    read = every_field.fields_read_by_class(kind)
    without = {
        name
        for name in read - fields_by_class(NOT_CHANGED).get(kind, set())
        if not any(every_field.has_effect(example, name) for example in examples)
    }
    assert without == fields_by_class(WITHOUT_EFFECT).get(kind, set())


@pytest.mark.full
@pytest.mark.thorough_except(
    "gemma4_text with shared entries-num_kv_shared_layers",
    "exaone4 with a pattern-sliding_window_pattern",
)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma4_text with shared entries", "num_kv_shared_layers"),
        ("gemma4_text with shared entries", "use_double_wide_mlp"),
        ("exaone4 with a pattern", "sliding_window_pattern"),
        ("ernie4_5_moe with dense layers", "moe_layer_interval"),
        ("nemotron_h with an mlp", "intermediate_size"),
        ("falcon_h1 with norms", "mamba_norm_before_gate"),
        ("qwen3_moe", "intermediate_size"),
        ("kimi_linear", "topk_group"),
    ],
)
def test_a_field_that_needs_a_switch_changes_the_logits(family, name) -> None:
    """A field without effect in its model would be compared in vain."""
    assert every_field.changes_logits(family, name)
    results = [outcome(case) for case in every_field.cases_of(family) if case.name == name]
    assert not any(result.wrong for result in results)
    assert any(result.summary.startswith("equal") for result in results)


def test_layers_that_differ_are_refused_where_they_are_not_read() -> None:
    case = Case("llama", "", "per_layer_config", {"1": {"rms_norm_eps": 0.02}})
    assert outcome(case).summary.startswith("refused: per_layer_config={'1': {'rms_norm_eps'")
    with pytest.raises(
        CheckpointError, match=r"^config\.json: per_layer_config=.*left out, or null"
    ):
        parse_config(case.file())
    for nothing in ({}, None):
        assert parse_config(Case("llama", "", "per_layer_config", nothing).file()).layers == ()


@pytest.mark.full
def test_an_error_names_the_field_as_the_file_does() -> None:
    """Check each name of a field that is read under another name, in every family."""
    messages = {}
    for example in every_field.FAMILIES:
        family = FAMILIES[example.split(maxsplit=1)[0]]
        names = {**family.aliases, **family.derived_from}
        for stated, name in names.items():
            raw = Case(example, "", "rms_norm_eps", 1e-5).file()
            inner = raw if family.nested is None else raw[family.nested]
            for same in (name, *(key for key, value in names.items() if value == name)):
                inner.pop(same, None)
            outer, _, key = stated.partition(".")
            inner[outer] = {**(inner.get(outer) or {}), key: "odd"} if key else "odd"
            with pytest.raises(CheckpointError) as error:
                parse_config(raw)
            path = stated if family.nested is None else f"{family.nested}.{stated}"
            messages[example, stated] = str(error.value)
            assert re.match(
                rf"config\.json: {re.escape(path)}( has 'd'|='odd'): ", str(error.value)
            )
            assert not re.search(rf"\b{name}\b", str(error.value).replace(stated, ""))
    assert len(messages) > 40
    assert "hidden_activation" in messages["muse_glimmer", "hidden_activation"]


def test_an_error_names_the_name_that_won() -> None:
    both = Case("step3p7", "", "rms_norm_eps", 1e-5).file()
    both["text_config"] |= {"moe_top_k": "7", "num_experts_per_tok": 2}
    with pytest.raises(CheckpointError, match=r"^config\.json: text_config\.moe_top_k='7': "):
        parse_config(both)
    both = Case("qwen3_moe", "", "rms_norm_eps", 1e-5).file()
    both |= {"num_local_experts": 6, "num_experts": "6"}
    with pytest.raises(CheckpointError, match=r"^config\.json: num_experts='6': "):
        parse_config(both)
    several = Case("muse_glimmer", "", "rms_norm_eps", 1e-5).file()
    several["text_config"] |= {"hidden_activation": "gelu", "vocab_size": "hidden_act"}
    with pytest.raises(CheckpointError, match=r"text_config\.vocab_size='hidden_act': "):
        parse_config(several)


@pytest.mark.full
def test_a_part_of_all_files_is_read_as_transformers_reads_it() -> None:
    check(every_field.cases()[::599])


@pytest.mark.thorough
@pytest.mark.parametrize("family", every_field.FAMILIES)
def test_every_file_of_a_family_is_read_as_transformers_reads_it(family) -> None:
    results = check(every_field.cases(family))
    if "index_topk" in every_field.FAMILIES[family][1]:
        compared = [result.compared_tokens for result in results if result.is_selected]
        print(f"compared tokens of sparse attention: {Counter(compared)}")
        assert max(compared) >= LENGTH * 3 // 4
