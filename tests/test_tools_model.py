"""Check the script that trains a model to call tools."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tools_model import network
from benchmarks.tools_model.__main__ import save
from benchmarks.tools_model.conversations import Conversation, Writer, read_phrases
from benchmarks.tools_model.encoding import answers, encode, label_places, make_tokenizer
from benchmarks.tools_model.evaluation import (
    Hits,
    Score,
    evaluate,
    held_out,
    is_named,
    predict,
    right_tokens,
    score,
)
from benchmarks.tools_model.first_weights import Builder, first_target
from benchmarks.tools_model.teaching import ROWS, Stage, chat_row, train
from specjax.chat import ChatAnswer, ToolCall
from specjax.models.generation_config import read_defaults
from specjax.models.transformer import Target
from specjax.sampling import Sampling

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def target() -> Target:
    return first_target(TOKENIZER, seed=0)


def chat(seed: str = "a", turns: int = 3) -> Conversation:
    return Writer(seed).conversation(1500, system_characters=60, turns=turns)


def test_a_conversation_depends_on_its_seed() -> None:
    assert chat("a") == chat("a")
    assert chat("a") != chat("b")


def test_no_training_conversation_has_a_sentence_that_is_held_out() -> None:
    assert set(read_phrases(is_held_out=True).sentences).isdisjoint(read_phrases().sentences)


def test_tools_of_a_list_differ_in_names_and_descriptions() -> None:
    functions = [tool["function"] for tool in Writer("a").conversation(20_000).tools]
    assert len(functions) > 30
    for field in ("name", "description"):
        assert len({function[field] for function in functions}) == len(functions)


def test_tokens_of_a_conversation_are_those_of_the_template() -> None:
    conversation = chat()
    rendered = TOKENIZER.apply_chat_template(
        conversation.messages, tools=conversation.tools, tokenize=False
    )
    assert TOKENIZER.decode(encode(TOKENIZER, conversation)) == rendered


def test_answers_are_what_is_learned() -> None:
    conversation = chat(turns=6)
    tokens = encode(TOKENIZER, conversation)
    spans = list(answers(TOKENIZER, tokens))
    expected = [message for message in conversation.messages if message["role"] == "assistant"]
    assert len(spans) == len(expected)
    places = label_places(TOKENIZER, tokens)
    assert [*places] == [index for span in spans for index in range(span.start, span.end)]
    for span, message in zip(spans, expected, strict=True):
        answer = TOKENIZER.decode(tokens[span.start : span.end])
        if not message.get("tool_calls"):
            assert answer == message["content"] + "<|im_end|>"
            continue
        function = message["tool_calls"][0]["function"]
        inner = answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>")
        assert json.loads(inner) == function
        (first, last), *_ = span.names
        assert TOKENIZER.decode(tokens[first:last]).startswith(function["name"] + '"')


@pytest.mark.full
def test_the_forward_pass_is_that_of_the_library(target: Target) -> None:
    tokens = jnp.asarray(encode(TOKENIZER, chat(turns=8))[:384])[None]
    states, _ = target.read(tokens)
    ours = network.hidden_states(target.params, target.config, tokens)
    np.testing.assert_allclose(ours, states.hidden, atol=5e-4)


def test_a_saved_model_is_read_with_its_template(target: Target, tmp_path: Path) -> None:
    save(target, tmp_path)
    loaded = Target.from_pretrained(tmp_path)
    assert loaded.config == target.config
    assert loaded.config.max_positions == 32_768
    jax.tree.map(np.testing.assert_array_equal, loaded.params, target.params)
    # A program that states no temperature gets the likeliest tokens.
    assert read_defaults(tmp_path).sampling == Sampling(temperature=1.0, top_k=1)


def states_of(target: Target, tokens: list[int], layers: int) -> np.ndarray:
    """Return the states ``[T, H]`` after so many layers."""
    filled = np.pad(tokens, (0, -len(tokens) % network.WINDOW))
    states = target.params["embed"][jnp.asarray(filled)[None]]
    for index in range(layers):
        layer = target.params["layers"][index]
        states = network.layer_states(layer, states, target.config, index)
    return np.asarray(states[0, : len(tokens)])


@pytest.mark.full
def test_heads_look_at_the_tokens_before(target: Target) -> None:
    builder = Builder(TOKENIZER, target.config, seed=0)
    tokens = encode(TOKENIZER, chat())[:300]
    states = states_of(target, tokens, layers=1)
    for distance in (1, 2, 3, 4):
        part = builder.parts[f"before{distance}"]
        expected = builder.stems[tokens[:-distance], : part.stop - part.start]
        np.testing.assert_allclose(states[distance:, part], expected, atol=1e-3)


@pytest.mark.full
def test_tokens_of_a_list_know_their_tool_and_those_behind_it_do_not(target: Target) -> None:
    builder = Builder(TOKENIZER, target.config, seed=0)
    tokens = encode(TOKENIZER, chat())[:1024]
    marks = {token: index for index, token in enumerate(builder.kinds()["tool"])}
    end = builder.kinds()["end"][0]
    states = states_of(target, tokens, layers=2)[:, builder.parts["tool"]]
    tool = None
    for token, state in zip(tokens, states, strict=True):
        tool = None if token == end else marks.get(token, tool)
        expected = np.zeros(len(state)) if tool is None else builder.tools[tool]
        np.testing.assert_allclose(state * (0.5 if token in marks else 1), expected, atol=0.01)


@pytest.mark.full
@pytest.mark.parametrize("seed", ["a", "b"])
def test_heads_copy_the_name_of_the_tool_that_is_meant(target: Target, seed: str) -> None:
    conversation = Writer(seed, is_held_out=True).conversation(3000, turns=4)
    tokens = encode(TOKENIZER, conversation)
    is_right = right_tokens(target, TOKENIZER, tokens)
    names = [name for answer in answers(TOKENIZER, tokens) for name in answer.names]
    assert names
    for first, last in names:
        assert is_right[first : last - 1].all()
    # The form of a call is not learned yet.
    assert not any(is_right[span.start] for span in answers(TOKENIZER, tokens) if span.names)


@pytest.mark.full
def test_a_call_counts_if_each_of_its_tokens_is_the_likeliest(target: Target) -> None:
    tokens = encode(TOKENIZER, chat(turns=4))
    spans = list(answers(TOKENIZER, tokens))
    calls = sum(bool(span.names) for span in spans)
    untrained = predict(target, TOKENIZER, tokens)
    assert untrained == Hits(calls=calls, texts=len(spans) - calls)
    assert untrained + Hits(tools=1) == Hits(calls, 1, 0, len(spans) - calls, 0)


def test_rows_depend_on_their_seed_alone() -> None:
    row, again, other_row = (chat_row(TOKENIZER, seed, 512, (0.2, 0.5)) for seed in "aab")
    np.testing.assert_array_equal(row, again)
    assert (row != other_row).any()


def call_of(conversation: Conversation) -> dict[str, Any]:
    """Return the function of a conversation's first call."""
    return conversation.messages[1]["tool_calls"][0]["function"]


def test_a_score_counts_right_tools_calls_and_texts() -> None:
    chats = held_out(3)
    names = [call_of(chat)["name"] for chat in chats]
    arguments = [json.dumps(call_of(chats[0])["arguments"]), '{"no": "such argument"}']
    calls = [
        ChatAnswer(tool_calls=(ToolCall(name, text),))
        for name, text in zip(names[:2], arguments, strict=True)
    ]
    text = ChatAnswer(content="Something else.")
    right = ChatAnswer(content=chats[1].messages[-1]["content"])
    assert score([*calls, text], [text, right, calls[0]], chats) == Score(3, 2, 1, 2, 1)


@pytest.mark.thorough
def test_answers_are_read_from_the_text_that_a_model_writes(target: Target) -> None:
    chats = held_out(2, 300, 400)
    scores = evaluate(target, TOKENIZER, chats, batch=2)
    assert scores["all"].conversations == 2
    assert scores["named"].conversations == sum(map(is_named, chats))
    # Without training nothing ends an answer, so no call is whole.
    assert scores["all"].calls == 0


@pytest.mark.thorough
def test_a_run_that_was_killed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    stages = (Stage(rows=ROWS, length=384),)
    whole = train(tmp_path / "whole", stages, 4, checkpoint_every=1, measured=0)
    train(tmp_path / "killed", stages, 4, checkpoint_every=1, measured=0, stop_after=3)
    resumed = train(tmp_path / "killed", stages, 4, checkpoint_every=1, measured=0)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    first = first_target(TOKENIZER, seed=0)
    assert np.abs(whole.params["layers"][-1]["down"]).max() > 0
    # Attention is not trained.
    np.testing.assert_array_equal(whole.params["layers"][4]["q"], first.params["layers"][4]["q"])
