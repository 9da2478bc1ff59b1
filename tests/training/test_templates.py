"""The chat templates that come with the project: what they write, and what of it is learnt.

The expected texts are those of the published templates, except the date, which is fixed in ours.
"""

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.config import ConfigError
from specjax.templates import with_template
from specjax.training import chat
from tests.conftest import ASSETS

TEMPLATES = ASSETS.parents[1] / "configs" / "templates"

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
SECOND = [{"role": "user", "content": "And three?"}, {"role": "assistant", "content": "Seven."}]


@dataclass(frozen=True)
class Format:
    """The text that a template writes.

    Attributes:
        special: the template's special tokens, apart from ``ends``.
        ends: the end of an answer that another turn follows, and the end of the last answer.
        prompt: the first question, with the beginning of the answer that is to be generated.
        talk: the system message and two rounds; empty if there is no system message.
        round: the first round alone.
        before: learnt before the words of an answer.
    """

    special: tuple[str, ...]
    ends: tuple[str, str]
    prompt: str
    round: str
    talk: str
    before: str = ""
    bos: str | None = None
    eos: str = "<|endoftext|>"

    @property
    def learnt(self) -> list[str]:
        """The texts that are learnt from two rounds."""
        return [f"{self.before}Four.{self.ends[0]}", f"{self.before}Seven.{self.ends[1]}"]


_HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by"
    " OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n# Valid"
    " channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
)
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>")
_GRANITE_ROUND = (
    "<|start_of_role|>user<|end_of_role|>Two and two?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>Four.<|end_of_text|>\n"
)
_GRANITE_TALK = (
    "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n" + _GRANITE_ROUND + ""
    "<|start_of_role|>user<|end_of_role|>And three?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>Seven.<|end_of_text|>\n"
)
_GRANITE_ASKED = (
    "<|start_of_role|>user<|end_of_role|>Two and"
    " two?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
)
_GRANITE_3 = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024. Today's Date: April"
    " 16, 2025. You are Granite, developed by IBM. You are a helpful AI assistant.<|end_of_text|>\n"
)
_GRANITE_4 = (
    "<|start_of_role|>system<|end_of_role|>You are a helpful assistant. "
    "Please ensure responses are professional, accurate, and safe.<|end_of_text|>\n"
)
_OLMO = (
    "<|im_start|>system\nYou are a helpful function-calling AI assistant. "
    "You do not currently have access to any functions. <functions></functions><|im_end|>\n"
)
_SMOL = (
    "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: 08 July"
    " 2025\nReasoning Mode: /think\n\n## Custom Instructions\n\n"
)
_SMOL_DEFAULT = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Your role as an"
    " assistant involves thoroughly exploring questions through a systematic thinking process"
    " before providing the final precise and accurate solutions. This requires engaging in a"
    " comprehensive cycle of analysis, summarizing, exploration, reassessment, reflection,"
    " backtracking, and iteration to develop well-considered thinking process. Please structure"
    " your response into two main sections: Thought and Solution using the specified format:"
    " <think> Thought section </think> Solution section. In the Thought section, detail your"
    " reasoning process in steps. Each step should include detailed considerations such as"
    " analysing questions, summarizing relevant findings, brainstorming new ideas, verifying the"
    " accuracy of the current steps, refining any errors, and revisiting previous steps. In the"
    " Solution section, based on various attempts, explorations, and reflections from the Thought"
    " section, systematically present the final solution that you deem correct. The Solution"
    " section should be logical, accurate, and concise and detail necessary steps needed to reach"
    " the conclusion.\n\n"
)

FORMATS = {
    "llama3": Format(
        bos="<|begin_of_text|>",
        special=("<|start_header_id|>", "<|end_header_id|>"),
        ends=("<|eot_id|>", "<|eot_id|>"),
        prompt=(
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTwo and two?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        round=(
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTwo and two?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
        ),
        talk=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nTwo and two?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd three?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nSeven.<|eot_id|>"
        ),
    ),
    "qwen3": Format(
        special=("<|im_start|>",),
        ends=("<|im_end|>", "<|im_end|>"),
        before="<think>\n\n</think>\n\n",
        prompt=(
            "<|im_start|>user\nTwo and"
            " two?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        round=(
            "<|im_start|>user\nTwo and"
            " two?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nFour.<|im_end|>\n"
        ),
        talk=(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo and"
            " two?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nFour.<|im_end|>\n"
            "<|im_start|>user\nAnd"
            " three?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSeven.<|im_end|>\n"
        ),
    ),
    "gemma2": Format(
        bos="<bos>",
        special=("<start_of_turn>",),
        ends=("<end_of_turn>", "<end_of_turn>"),
        prompt="<bos><start_of_turn>user\nTwo and two?<end_of_turn>\n<start_of_turn>model\n",
        round=(
            "<bos><start_of_turn>user\nTwo and"
            " two?<end_of_turn>\n<start_of_turn>model\nFour.<end_of_turn>\n"
        ),
        talk="",
    ),
    "gemma3": Format(
        bos="<bos>",
        special=("<start_of_turn>",),
        ends=("<end_of_turn>", "<end_of_turn>"),
        prompt="<bos><start_of_turn>user\nTwo and two?<end_of_turn>\n<start_of_turn>model\n",
        round=(
            "<bos><start_of_turn>user\nTwo and"
            " two?<end_of_turn>\n<start_of_turn>model\nFour.<end_of_turn>\n"
        ),
        talk=(
            "<bos><start_of_turn>user\nBe brief.\n\nTwo and"
            " two?<end_of_turn>\n<start_of_turn>model\nFour.<end_of_turn>\n<start_of_turn>user\nAnd"
            " three?<end_of_turn>\n<start_of_turn>model\nSeven.<end_of_turn>\n"
        ),
    ),
    "gemma4": Format(
        bos="<bos>",
        special=("<|turn>", "<|channel>", "<channel|>"),
        ends=("<turn|>", "<turn|>"),
        prompt="<bos><|turn>user\nTwo and two?<turn|>\n<|turn>model\n",
        round="<bos><|turn>user\nTwo and two?<turn|>\n<|turn>model\nFour.<turn|>\n",
        talk=(
            "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nTwo and"
            " two?<turn|>\n<|turn>model\nFour.<turn|>\n<|turn>user\nAnd"
            " three?<turn|>\n<|turn>model\nSeven.<turn|>\n"
        ),
    ),
    # The published template ends every prompt with an empty thought, but leaves it out of the last
    # answer too.
    "gemma4_31b": Format(
        bos="<bos>",
        special=("<|turn>", "<|channel>", "<channel|>"),
        ends=("<turn|>", "<turn|>"),
        prompt="<bos><|turn>user\nTwo and two?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        round=(
            "<bos><|turn>user\nTwo and"
            " two?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>Four.<turn|>\n"
        ),
        talk=(
            "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nTwo and"
            " two?<turn|>\n<|turn>model\nFour.<turn|>\n<|turn>user\nAnd"
            " three?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>Seven.<turn|>\n"
        ),
    ),
    "gpt_oss": Format(
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        ends=("", "<|return|>"),
        before="<|channel|>final<|message|>",
        prompt=_HARMONY + "<|start|>user<|message|>Two and two?<|end|><|start|>assistant",
        round=_HARMONY + "<|start|>user<|message|>Two and two?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        talk=_HARMONY + "<|start|>developer<|message|># Instructions\n\nBe"
        " brief.\n\n<|end|><|start|>user<|message|>Two and"
        " two?<|end|><|start|>assistant<|channel|>final<|message|>Four.<|end|>"
        "<|start|>user<|message|>And three?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Seven.<|return|>",
    ),
    "phi3": Format(
        special=("<|system|>", "<|user|>", "<|assistant|>"),
        ends=("<|end|>", "<|end|>"),
        prompt="<|user|>\nTwo and two?<|end|>\n<|assistant|>\n",
        round="<|user|>\nTwo and two?<|end|>\n<|assistant|>\nFour.<|end|>\n<|endoftext|>",
        talk=(
            "<|system|>\nBe brief.<|end|>\n<|user|>\nTwo and"
            " two?<|end|>\n<|assistant|>\nFour.<|end|>\n<|user|>\nAnd"
            " three?<|end|>\n<|assistant|>\nSeven.<|end|>\n<|endoftext|>"
        ),
    ),
    "phi4": Format(
        special=("<|im_start|>", "<|im_sep|>"),
        ends=("<|im_end|>", "<|im_end|>"),
        prompt="<|im_start|>user<|im_sep|>Two and two?<|im_end|><|im_start|>assistant<|im_sep|>",
        round=(
            "<|im_start|>user<|im_sep|>Two and"
            " two?<|im_end|><|im_start|>assistant<|im_sep|>Four.<|im_end|>"
        ),
        talk=(
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Two and"
            " two?<|im_end|><|im_start|>assistant<|im_sep|>Four.<|im_end|>"
            "<|im_start|>user<|im_sep|>And three?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Seven.<|im_end|>"
        ),
    ),
    "phi4_mini": Format(
        special=("<|system|>", "<|user|>", "<|assistant|>"),
        ends=("<|end|>", "<|end|>"),
        prompt="<|user|>Two and two?<|end|><|assistant|>",
        round="<|user|>Two and two?<|end|><|assistant|>Four.<|end|><|endoftext|>",
        talk=(
            "<|system|>Be brief.<|end|><|user|>Two and two?<|end|><|assistant|>Four.<|end|>"
            "<|user|>And three?<|end|><|assistant|>Seven.<|end|><|endoftext|>"
        ),
    ),
    "granite3": Format(
        special=_GRANITE,
        ends=("<|end_of_text|>", "<|end_of_text|>"),
        prompt=_GRANITE_3 + _GRANITE_ASKED,
        round=_GRANITE_3 + _GRANITE_ROUND,
        talk=_GRANITE_TALK,
    ),
    "granite4": Format(
        special=_GRANITE,
        ends=("<|end_of_text|>", "<|end_of_text|>"),
        prompt=_GRANITE_4 + _GRANITE_ASKED,
        round=_GRANITE_4 + _GRANITE_ROUND,
        talk=_GRANITE_TALK,
    ),
    "granite4.1": Format(
        special=_GRANITE,
        ends=("<|end_of_text|>", "<|end_of_text|>"),
        prompt=_GRANITE_ASKED,
        round=_GRANITE_ROUND,
        talk=_GRANITE_TALK,
    ),
    "ministral3": Format(
        bos="<s>",
        eos="</s>",
        special=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
        ends=("</s>", "</s>"),
        prompt="<s>[INST]Two and two?[/INST]",
        round="<s>[INST]Two and two?[/INST]Four.</s>",
        talk=(
            "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Two and two?[/INST]Four.</s>[INST]And"
            " three?[/INST]Seven.</s>"
        ),
    ),
    "seed_oss": Format(
        special=("<seed:bos>",),
        ends=("<seed:eos>", "<seed:eos>"),
        prompt="<seed:bos>user\nTwo and two?<seed:eos><seed:bos>assistant\n",
        round="<seed:bos>user\nTwo and two?<seed:eos><seed:bos>assistant\nFour.<seed:eos>",
        talk=(
            "<seed:bos>system\nBe brief.<seed:eos><seed:bos>user\nTwo and"
            " two?<seed:eos><seed:bos>assistant\nFour.<seed:eos><seed:bos>user\nAnd"
            " three?<seed:eos><seed:bos>assistant\nSeven.<seed:eos>"
        ),
    ),
    "olmo3": Format(
        special=("<|im_start|>",),
        ends=("<|im_end|>", "<|endoftext|>"),
        prompt=_OLMO + "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n",
        round=_OLMO
        + "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\nFour.<|endoftext|>",
        talk=(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo and two?<|im_end|>\n"
            "<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nAnd three?<|im_end|>\n"
            "<|im_start|>assistant\nSeven.<|endoftext|>"
        ),
    ),
    "smollm3": Format(
        special=("<|im_start|>",),
        ends=("<|im_end|>", "<|im_end|>"),
        prompt=_SMOL
        + _SMOL_DEFAULT
        + "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n",
        round=_SMOL
        + _SMOL_DEFAULT
        + "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n",
        talk=_SMOL + "Be brief.\n\n<|im_start|>user\nTwo and"
        " two?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nAnd"
        " three?<|im_end|>\n<|im_start|>assistant\nSeven.<|im_end|>\n",
    ),
}


def make_tokenizer(name: str, has_marks: bool = True):
    """Return a tokenizer with one token for each byte, and with the template's file.

    If ``has_marks`` it has one more token for each mark of a turn.
    """
    form = FORMATS[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=form.bos, eos_token=form.eos
    )
    if has_marks:
        tokenizer.add_tokens([*form.special, *filter(None, form.ends)], special_tokens=True)
    return with_template(tokenizer, str(TEMPLATES / f"{name}.jinja"))


def find_learnt(tokenizer, talk) -> list[list[int]]:
    """Return the runs of tokens that are to be learnt."""
    ((ids, mask),) = chat.encode(tokenizer, [talk], responses_only=True)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk, tokenize=False)
    return [
        [token for token, _ in run]
        for counts, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1))
        if counts
    ]


def test_every_template_is_tested() -> None:
    assert {file.stem for file in TEMPLATES.iterdir()} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_writes_what_the_published_one_writes(name) -> None:
    form, tokenizer = FORMATS[name], make_tokenizer(name)

    def write(talk, **options) -> str:
        return tokenizer.apply_chat_template(talk, tokenize=False, **options)

    assert write(FIRST[:1], add_generation_prompt=True) == form.prompt
    assert write(FIRST) == form.round
    assert form.round.startswith(form.prompt)  # generation continues where the answer was learnt
    if form.talk:
        assert write([SYSTEM, *FIRST, *SECOND]) == form.talk
    else:
        with pytest.raises(
            ConfigError, match=r"conversation 1: .*refuses it .*there is no system message"
        ):
            chat.encode(tokenizer, [[SYSTEM, *FIRST]], responses_only=True)


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_the_assistants_words_and_the_whole_end_of_its_turn_are_learnt(name, has_marks) -> None:
    form, tokenizer = FORMATS[name], make_tokenizer(name, has_marks)
    runs = find_learnt(tokenizer, [*FIRST, *SECOND])
    assert [tokenizer.decode(run) for run in runs] == form.learnt
    if has_marks:
        assert all(
            tokenizer.convert_ids_to_tokens(run[-1]) == end
            for run, end in zip(runs, form.ends, strict=True)
            if end
        )


@pytest.mark.parametrize("name", FORMATS)
def test_without_its_marks_a_template_is_refused(name) -> None:
    tokenizer = make_tokenizer(name)
    for mark in ("{%- generation %}", "{% endgeneration %}", "{%- endgeneration %}"):
        tokenizer.chat_template = tokenizer.chat_template.replace(mark, "")
    with pytest.raises(ConfigError, match="marks no token as the assistant's"):
        chat.encode(tokenizer, [FIRST], responses_only=True)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "ministral3"])
def test_turns_that_do_not_alternate_are_refused(name) -> None:
    with pytest.raises(ConfigError, match=r"conversation 2: .*refuses it .*must take turns"):
        chat.encode(make_tokenizer(name), [FIRST, [*FIRST, FIRST[1]]], responses_only=True)


@pytest.mark.parametrize(
    "name", ["gemma4", "gemma4_31b", "gpt_oss", "phi3", "phi4", "granite4", "granite4.1"]
)
def test_a_message_that_a_template_has_no_form_for_is_refused(name) -> None:
    with pytest.raises(ConfigError, match=r"conversation 1: .*refuses it .*messages are known"):
        chat.encode(
            make_tokenizer(name), [[*FIRST, {"role": "tool", "content": "4"}]], responses_only=True
        )


def test_harmony_has_what_was_thought_before_the_last_answer_alone() -> None:
    tokenizer = make_tokenizer("gpt_oss")
    thinking = [
        FIRST[0],
        FIRST[1] | {"thinking": "Add."},
        SECOND[0],
        SECOND[1] | {"thinking": "Add again."},
    ]
    first, last = (tokenizer.decode(run) for run in find_learnt(tokenizer, thinking))
    assert first == "<|channel|>final<|message|>Four."
    assert (
        last == "<|channel|>analysis<|message|>Add"
        " again.<|end|><|start|>assistant<|channel|>final<|message|>Seven.<|return|>"
    )


@pytest.mark.parametrize("name", ["gemma4", "gemma4_31b"])
def test_gemma_4_gives_an_answer_again_without_its_thought(name) -> None:
    tokenizer = make_tokenizer(name)
    thinking = [
        FIRST[0],
        {"role": "assistant", "content": "<|channel>thought\nAdd.\n<channel|>Four."},
    ]
    assert tokenizer.apply_chat_template(thinking, tokenize=False) == FORMATS[name].round


def test_smollm3_has_its_mode_from_the_system_message() -> None:
    tokenizer = make_tokenizer("smollm3")
    quick = [{"role": "system", "content": "Be brief. /no_think"}, *FIRST]
    text = tokenizer.apply_chat_template(quick, tokenize=False)
    round_without_thought = (
        "Be brief.\n\n<|im_start|>user\nTwo and two?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\nFour.<|im_end|>\n"
    )
    assert text == _SMOL.replace("/think", "/no_think") + round_without_thought
    assert text.startswith(
        tokenizer.apply_chat_template(quick[:2], tokenize=False, add_generation_prompt=True)
    )
    assert [tokenizer.decode(run) for run in find_learnt(tokenizer, quick)] == ["Four.<|im_end|>"]
    alone = [{"role": "system", "content": "/system_override Be brief."}, FIRST[0]]
    assert (
        tokenizer.apply_chat_template(alone, tokenize=False)
        == "<|im_start|>system\n Be brief.<|im_end|>\n<|im_start|>user\nTwo and two?<|im_end|>\n"
    )
