"""The tokens of thoughts that tokenizers state, and what their prompts open."""

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

import specjax
from specjax.errors import InputError
from specjax.grammars import ThinkingBudget
from specjax.text import encode_chat
from specjax.thoughts import encoded, stated_texts, thought_tokens
from tests.grammars.published_tokenizers import UnavailableError, published_tokenizer
from tests.grammars.thinking_oracle import forced_token

TEMPLATES = Path(__file__).parents[1] / "configs" / "templates"
CHAT = [{"role": "user", "content": "Why?"}]
# A template that writes the thought of an answer only where nothing follows.
BAR = "\N{FULLWIDTH VERTICAL LINE}"
DEEPSEEK = (
    "{{ bos_token }}{% for it in messages %}{% if it.role == 'user' %}<|User|>{{ it.content }}"
    "{% else %}<|Assistant|>{% if it.reasoning_content and loop.last %}<think>\n"
    "{{ it.reasoning_content }}\n</think>\n\n{% endif %}{{ it.content }}<|end▁of▁sentence|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
).replace("|", BAR)
MISTRAL = (
    "{% for it in messages %}{% if it.role == 'user' %}[INST]{{ it.content }}[/INST]{% else %}"
    "{% if it.thinking %}[THINK]{{ it.thinking }}[/THINK]{% endif %}{{ it.content }}</s>{% endif %}"
    "{% endfor %}"
)
PLAIN_WORDS = (
    "{% for it in messages %}{{ it.role }}: {% if it.reasoning %}Here is my thought:\n"
    "{{ it.reasoning }}\nHere is my answer:\n{% endif %}{{ it.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GPT_OSS = (TEMPLATES / "gpt_oss.jinja").read_text()


def tokenizer_of(name: str, template: str | None = None) -> Any:
    try:
        tokenizer = copy(published_tokenizer(name))
    except UnavailableError as error:
        pytest.skip(f"no tokenizer: {error}")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def small() -> Any:
    return specjax.load("embedded").tokenizer


@pytest.mark.full
def test_qwen3_and_its_prompts() -> None:
    tokenizer = tokenizer_of("qwen3")
    assert stated_texts(tokenizer) == ("<think>", "</think>")
    thought = thought_tokens(tokenizer)
    assert tokenizer.convert_ids_to_tokens(thought.begin_ids) == ["<think>"]
    assert tokenizer.convert_ids_to_tokens(thought.end_ids) == ["</think>"]
    for settings, content, opens in (
        ({}, "Why?", False),
        ({"enable_thinking": False}, "Why?", False),  # it has an empty thought
        ({}, "What does <think> mean?", False),  # the token is not in the answer
    ):
        prompt = encode_chat(tokenizer, [{"role": "user", "content": content}], settings)
        assert thought.start(prompt).is_inside == opens
    # The later template of the models that always think.
    opening = "{{- '<|im_start|>assistant\\n' }}"
    head, _, tail = tokenizer.chat_template.rpartition(opening)
    tokenizer.chat_template = head + opening.replace("\\n'", "\\n<think>\\n'") + tail
    assert stated_texts(tokenizer) == ("<think>", "</think>")
    assert thought_tokens(tokenizer) == thought
    assert thought.start(encode_chat(tokenizer, CHAT)) == (True, 0, 0)


@pytest.mark.full
def test_deepseek_whose_prompts_open_the_thought() -> None:
    tokenizer = tokenizer_of("deepseek", DEEPSEEK)
    thought = thought_tokens(tokenizer)
    assert tokenizer.convert_ids_to_tokens([*thought.begin_ids, *thought.end_ids]) == [
        "<think>",
        "</think>",
    ]
    assert tokenizer.convert_ids_to_tokens(thought.answer_ids) == [f"<{BAR}Assistant{BAR}>"]
    assert thought.start(encode_chat(tokenizer, CHAT)) == (True, 0, 0)


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (MISTRAL, ("[THINK]", "[/THINK]")),
        (PLAIN_WORDS, ("Here is my thought:", "Here is my answer:")),
        (DEEPSEEK, ("<think>", "</think>")),
        (GPT_OSS, ("<|channel|>analysis<|message|>", "<|end|>")),
        ((TEMPLATES / "qwen3.jinja").read_text(), None),  # it never writes the thought
        ((TEMPLATES / "llama3.jinja").read_text(), None),
        (None, None),
    ],
)
def test_what_templates_state(small, template, texts) -> None:
    small.chat_template = template
    small.add_tokens(["<|end|>", "<|start|>"], special_tokens=True)
    assert stated_texts(small) == texts
    if texts is None:
        with pytest.raises(InputError, match="thinking_budget: the tokenizer does not state"):
            thought_tokens(small)
        return
    thought = thought_tokens(small)
    assert small.decode(thought.begin_ids) == texts[0]
    assert small.decode(thought.end_ids) == texts[1]
    opens = "<think>\n{% endif %}" in template
    assert thought.start(encode_chat(small, CHAT)).is_inside == opens


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_response_template_comes_first(small, is_listed) -> None:
    small.chat_template = MISTRAL
    field: dict[str, Any] = {"open": "<t>\n", "close": "\n</t>"}
    if is_listed:
        field = {name: [value, "other"] for name, value in field.items()}
    small.response_template = {"start_anchor": "[/INST]", "fields": {"thinking": field}}
    assert stated_texts(small) == ("<t>", "</t>")
    # Patterns are no tokens: the chat template says which they are.
    small.response_template = {
        "start_anchor": "[/INST]",
        "fields": {"thinking": {"open_pattern": "<t+>", "close": "</t>"}},
    }
    assert stated_texts(small) == ("[THINK]", "[/THINK]")


def test_stated_texts_come_before_the_tokenizers(small) -> None:
    small.chat_template = MISTRAL
    budget = encoded([ThinkingBudget(3, ("import", "os")), None, ThinkingBudget(3)], small)
    assert [row and small.decode(row.thought.begin_ids) for row in budget] == [
        "import",
        None,
        "[THINK]",
    ]


@pytest.mark.full
def test_generation_from_text() -> None:
    """Check a row with a budget beside one without, whose text is the free one."""
    generate = specjax.load("embedded")
    prompt, options = "import os\nimport ", {"max_new_tokens": 24}
    budgets = {"thinking_budget": [3, None], "thought_tokens": ("import", " as")}
    limited, free = generate([prompt, prompt], **options, **budgets)
    alone, _ = generate([prompt, prompt], **options)
    assert free.tokens == alone.tokens != limited.tokens
    assert limited.grammar_completed is None
    thought = thought_tokens(generate.tokenizer, ("import", " as"))
    output = list(limited.tokens)
    law = thought.begin_ids, thought.end_ids, 3
    forced = [forced_token(generate.encode(prompt), output[:at], *law) for at in range(len(output))]
    assert any(token is not None for token in forced)
    assert all(it in (None, token) for it, token in zip(forced, output, strict=True))


def test_what_cannot_be_used_is_refused_before_anything_runs() -> None:
    generate = specjax.load("embedded")
    with pytest.raises(InputError, match="thinking_budget: the tokenizer does not state"):
        generate("a", thinking_budget=3)
    with pytest.raises(InputError, match="thinking_budget=-1: must be a whole number"):
        generate("a", thinking_budget=-1)
    with pytest.raises(InputError, match="thought_tokens='ab': give the two texts"):
        generate("a", thinking_budget=1, thought_tokens="ab")
    with pytest.raises(InputError, match="which ends a thought, may be banned"):
        generate("a", thinking_budget=1, thought_tokens=("import", "os"), bad_words=["os"])


def test_texts_that_the_tokenizer_joins_with_a_line_break_are_refused(small) -> None:
    """Check a tokenizer that splits as those of GPT-4, Llama 3 and Qwen do."""
    backend = Tokenizer(models.BPE())
    words = Regex(r" ?[^\s\p{L}\p{N}]+[\r\n]*|\p{L}+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    corpus = ["<b>\nx\n</b>\n\ny "] * 20
    backend.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    joining = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(InputError, match=r"in '<b>\\n' the tokenizer joins '<b>'"):
        thought_tokens(joining, ("<b>", "</b>"))
    joining.add_tokens(["<b>", "</b>"])
    thought = thought_tokens(joining, ("<b>", "</b>"))
    assert (len(thought.begin_ids), len(thought.end_ids)) == (1, 1)
    assert len(thought_tokens(small, ("<b>", "</b>")).begin_ids) > 1


def test_texts_of_thoughts_are_those_of_a_budget_that_has_none() -> None:
    texts = ("import", " as")
    options = specjax.pipeline.settings(
        thinking_budget=[specjax.ThinkingBudget(3), 5, None], thought_tokens=texts
    )
    assert options.thinking_budget == [
        specjax.ThinkingBudget(3, texts),
        specjax.ThinkingBudget(5, texts),
        None,
    ]
    with pytest.raises(InputError, match=r"thought_tokens=.*: the thinking budget has its own"):
        specjax.pipeline.settings(
            thinking_budget=specjax.ThinkingBudget(3, texts), thought_tokens=texts
        )
