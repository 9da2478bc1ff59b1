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
from benchmarks.tools_model.encoding import answers, encode, make_tokenizer, weights
from benchmarks.tools_model.evaluation import Score, evaluate, held_out, is_named, score
from benchmarks.tools_model.first_weights import Builder, first_target
from benchmarks.tools_model.teaching import Stage, make_rows, stage_of, train
from specjax.chat import ChatAnswer, ToolCall
from specjax.models.transformer import Target

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


def test_answers_are_what_the_loss_counts() -> None:
    conversation = chat(turns=6)
    tokens = encode(TOKENIZER, conversation)
    spans = list(answers(TOKENIZER, tokens))
    expected = [message for message in conversation.messages if message["role"] == "assistant"]
    assert len(spans) == len(expected)
    counted = np.zeros(len(tokens), bool)
    for span, message in zip(spans, expected, strict=True):
        counted[span.start : span.end] = True
        answer = TOKENIZER.decode(tokens[span.start : span.end])
        if not message.get("tool_calls"):
            assert answer == message["content"] + "<|im_end|>"
            continue
        function = message["tool_calls"][0]["function"]
        inner = answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>")
        assert json.loads(inner) == function
        (first, last), *_ = span.names
        assert TOKENIZER.decode(tokens[first:last]).startswith(function["name"] + '"')
    np.testing.assert_array_equal(weights(TOKENIZER, tokens) > 0, counted)


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


def test_first_heads_look_at_the_tokens_before(target: Target) -> None:
    builder = Builder(TOKENIZER, target.config, seed=0)
    layer, embed = target.params["layers"][0], target.params["embed"]
    states = network.layer_states(layer, embed[builder.tokens], target.config, 0)[0]
    for distance in (1, 2, 3, 4):
        part = np.asarray(states[:, builder.parts[f"before{distance}"]])
        short = (builder.codes @ builder.short)[builder.tokens[0], : part.shape[1]]
        similarity = (part[distance:] * short[:-distance]).sum(1) / (
            np.linalg.norm(part[distance:], axis=1) * np.linalg.norm(short[:-distance], axis=1)
        )
        assert np.median(similarity) > 0.95


def test_tokens_of_a_description_have_the_name_of_their_tool(target: Target) -> None:
    builder = Builder(TOKENIZER, target.config, seed=0)
    states = target.params["embed"][builder.tokens]
    for index in (0, 1):
        states = network.layer_states(target.params["layers"][index], states, target.config, index)
    tokens = np.asarray(builder.tokens[0])
    names = [
        place + 1
        for place in range(2, len(tokens))
        if tokens[place] == builder.quote and tokens[place - 2] == builder.key
    ]
    part = builder.parts["name"]
    scores = (
        np.asarray(states[0, :, part])
        @ (builder.codes @ builder.short[:, : part.stop - part.start])[tokens[names]].T
    )
    right = [
        tokens[names[scores[place + 10].argmax()]] == tokens[place]
        for place in names
        if place + 10 < len(tokens)
    ]
    assert np.mean(right) > 0.7


def test_rows_depend_on_seed_and_step_alone() -> None:
    stage = Stage(steps=1, length=512, batch=2)
    rows, again, later = (make_rows(TOKENIZER, stage, 0, step) for step in (3, 3, 4))
    for row, same in zip(rows, again, strict=True):
        np.testing.assert_array_equal(row.tokens, same.tokens)
        np.testing.assert_array_equal(row.weights, same.weights)
    assert any(
        (row.tokens != next_row.tokens).any() for row, next_row in zip(rows, later, strict=True)
    )


def test_every_step_has_a_stage() -> None:
    stages = (Stage(steps=2, length=128, batch=1), Stage(steps=1, length=256, batch=1))
    assert [stage_of(stages, step).length for step in range(3)] == [128, 128, 256]


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


@pytest.mark.full
def test_answers_are_read_from_the_text_that_a_model_writes(target: Target) -> None:
    chats = held_out(2, 300, 400)
    scores = evaluate(target, TOKENIZER, chats, batch=2)
    assert scores["all"].conversations == 2
    assert scores["named"].conversations == sum(map(is_named, chats))
    # Without training nothing ends an answer, so no call is whole.
    assert scores["all"].calls == 0


@pytest.mark.full
def test_a_run_that_was_killed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    stages = (Stage(steps=2, length=512, batch=1), Stage(steps=2, length=640, batch=1))
    whole = train(tmp_path / "whole", stages, checkpoint_every=1, measure_every=0)
    train(tmp_path / "killed", stages, checkpoint_every=1, measure_every=0, stop_after=3)
    resumed = train(tmp_path / "killed", stages, checkpoint_every=1, measure_every=0)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    first = first_target(TOKENIZER, seed=0)
    assert np.abs(whole.params["embed"] - first.params["embed"]).max() > 0
