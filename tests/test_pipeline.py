"""Generate text from text, with the embedded pair, whose prompts here share one program.

Tests that are not about text use a smaller pair.
"""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import specjax
from specjax import decoding, text
from specjax.cli.main import main
from specjax.decoding.stats import Stats
from specjax.errors import InputError
from specjax.pipeline import Generation, Run, TextGenerator, settings
from specjax.serving import Engine
from specjax.text import GrowingText
from tests.conftest import ASSETS, tiny_target
from tests.test_text import of_bytes_and_spaces

PROMPT, COUNT = "import os\nimport ", 48  # those of the README, which shares the program


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return specjax.load("embedded", "embedded:draft", draft="chain:4")


@pytest.fixture(scope="module")
def whole(generator) -> Generation:
    return generator(PROMPT, max_new_tokens=COUNT)


@pytest.fixture(scope="module")
def tiny(tiny_pair) -> TextGenerator:
    """Return a generator of a random pair, for tests of tokens and not of text.

    Another batch or model compiles in a third of the time.
    """
    return specjax.load(*tiny_pair, draft="chain:4")


@pytest.mark.full
def test_text_tokens_and_statistics_are_the_command_lines(capsys, whole) -> None:
    command = [
        *("generate", "--drafter", "embedded:draft", "--prompt", PROMPT),
        *("--max-new-tokens", str(COUNT)),
    ]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (whole.text, list(whole.tokens)) == (record["text"], record["token_ids"])
    assert whole.statistics.acceptance_length == record["statistics"]["acceptance_length"] > 1.5
    assert main(command) == 0
    assert capsys.readouterr().out == whole.text + "\n"


@pytest.mark.full
def test_pieces_joined_are_the_whole(generator, whole) -> None:
    pieces = list(generator.stream(PROMPT, max_new_tokens=COUNT))
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text


@pytest.mark.full
def test_text_ends_before_a_stop_string(generator, whole) -> None:
    words = [generator.tokenizer.decode([token]) for token in whole.tokens]
    inside = max(words[2:5], key=len)[1:3]  # within a token
    across = words[2][-1] + words[3][0]  # the end of one token and the beginning of the next
    for stop in ([inside], [across], ["never there", across], [inside, across]):
        expected = whole.text[
            : min(whole.text.find(string) for string in stop if string in whole.text)
        ]
        stopped = generator(PROMPT, max_new_tokens=COUNT, stop=stop)
        assert stopped.text == expected, stop
        assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
        decoded = generator.tokenizer.decode(stopped.tokens)
        assert any(string in decoded for string in stop)
        assert not any(string in generator.tokenizer.decode(stopped.tokens[:-1]) for string in stop)
        assert stopped.statistics.emitted < COUNT  # generation itself stopped
        assert "".join(generator.stream(PROMPT, max_new_tokens=COUNT, stop=stop)) == expected
    assert generator(PROMPT, max_new_tokens=COUNT, stop=["never there"]).text == whole.text
    by_string = generator(PROMPT, max_new_tokens=COUNT, stop=across)
    assert by_string == generator(PROMPT, max_new_tokens=COUNT, stop=[across])


@pytest.mark.parametrize("at_once", [1, 2, 9])
@pytest.mark.parametrize(
    ("tokens", "stop", "count"),
    [
        ("a <0x0A> b <0x0A> a", "\n", 2),
        ("a <0x0A>", "\n", 2),  # the limit comes before any other token
        ("a <0x0A> </s>", "\n", 2),
        ("a <0x0A> <0x0A> <0x20> b a", "\n", 2),
        ("a <0x0A> <0x0A> <0x20> b a", "\n\n", 3),
        ("a <0x0A> b <0x0A> a", "\nb", 3),
        ("a <0x0A> <0xE8> <0xAA> <0x9E> b", "\n", 2),
        ("a <0x0A> <0xE8> <0xAA> <0x9E> b", "語", 5),
        # The first run of bytes is no text, and so its line end is none either.
        ("a <0x0A> <0xE2> b <0x0A> <0x0A> a", "\n", 5),
        ("a <0x0A> <0xE2> b", "\n", None),
    ],
)
def test_tokens_end_with_the_one_that_completes_a_stop_string(tokens, stop, count, at_once) -> None:
    """Check that tokens end at the stop string although a byte is decoded a token late.

    Whether a line end that is a byte is text depends on the bytes after it.
    """
    tokenizer = of_bytes_and_spaces("llama")
    prompt, output = (
        tokenizer.convert_tokens_to_ids(words.split()) for words in ("\u2581the", tokens)
    )
    ends = [*range(at_once, len(output), at_once), len(output)]
    whole = np.array([prompt + output])
    results = (
        decoding.Result(whole, np.array([len(prompt) + end]), Stats.zeros(1, 1)) for end in ends
    )
    run = Run(results, [GrowingText(tokenizer, prompt, [stop])])
    pieces = [piece for (piece,) in run]
    (generation,) = run.generations
    decoded = tokenizer.decode(prompt + output, skip_special_tokens=True)[len("the") :]
    assert generation.tokens == tuple(output[:count])
    assert generation.text == "".join(pieces) == decoded.split(stop)[0]


@pytest.mark.full
def test_a_list_is_a_batch(tiny) -> None:
    whole = tiny(PROMPT, max_new_tokens=COUNT)
    both = tiny([PROMPT, "class Queue:\n"], max_new_tokens=COUNT)
    assert both[0].text == whole.text
    assert len(both) == 2
    assert both[1].text != whole.text


@pytest.mark.full
def test_end_tokens_are_the_models_own_unless_told(tiny) -> None:
    whole = tiny(PROMPT, max_new_tokens=COUNT)
    config = replace(tiny.target.config, eos_token_ids=(int(whole.tokens[3]),))
    ending = replace(tiny, target=tiny.target.replace(config=config))
    first = whole.tokens.index(whole.tokens[3])
    assert ending(PROMPT, max_new_tokens=COUNT).tokens == whole.tokens[: first + 1]
    assert (
        tiny(PROMPT, max_new_tokens=COUNT, eos_token_ids=(whole.tokens[3],)).tokens
        == whole.tokens[: first + 1]
    )


def test_a_chat_goes_through_the_models_template(generator) -> None:
    chatty = replace(generator, tokenizer=text.load_tokenizer(ASSETS / "target"))
    with pytest.raises(InputError, match="no chat template"):
        chatty([{"role": "user", "content": "hello"}])
    chatty.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('a bad role') }}{% endif"
        " %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (
        chatty.tokenizer.decode(chatty.encode(messages)) == "[system]be brief[user]hello[assistant]"
    )
    with pytest.raises(InputError, match="a bad role"):
        chatty([{"role": "bad", "content": "hello"}])


@pytest.mark.full
def test_every_bit_of_a_seed_counts(tiny_pair) -> None:
    """Check seeds that agree in their last 32 bits, too.

    The key of a seed below 2**32 is JAX's own.
    """
    tiny = specjax.load(tiny_pair[0])
    texts = [
        tiny("x", max_new_tokens=8, temperature=1.0, seed=seed).tokens
        for seed in (7, 2**32 + 7, 2**62 + 7)
    ]
    assert len(set(texts)) == 3
    for seed in (0, 7, 2**31, 2**32 - 1):
        assert settings(seed=seed).key == jax.random.key(seed)
    keys = {tuple(jax.random.key_data(settings(seed=2**n + 7).key).tolist()) for n in range(3, 63)}
    assert len(keys) == 60


def test_a_model_that_is_loaded_already_brings_no_tokenizer(generator) -> None:
    with pytest.raises(InputError, match="tokenizer=None"):
        specjax.load(generator.target)
    generate = specjax.load(generator.target, "prompt-lookup", tokenizer=ASSETS / "target")
    assert generate.drafter == specjax.PromptLookup()
    longer = specjax.load(
        generator.target, generate.drafter, draft="chain:30", tokenizer=generate.tokenizer
    )
    assert longer.drafter.draft == specjax.Chain(30)
    assert specjax.load(generator.target, "none", tokenizer=generate.tokenizer).drafter is None


@pytest.mark.full
def test_calls_and_an_engine_speculate_as_it_was_loaded_unless_they_state_it(tiny_pair) -> None:
    """Load a generator that does not speculate, and let a call, a row and a request do so."""
    generate = specjax.load(*tiny_pair, draft="chain:4", speculation="off")
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    expected = generate(PROMPT, **options)
    assert (expected.statistics.drafted, expected.statistics.emitted) == (0, 12)
    drafted = generate(PROMPT, speculation="auto", **options)
    assert drafted.statistics.drafted > 0 and drafted.tokens == expected.tokens
    rows = generate([PROMPT] * 3, speculation=["auto", "off", 1], **options)
    assert [len(row.statistics.by_position) for row in rows] == [4, 4, 4]
    assert [sum(row.statistics.drafted_at[1:]) > 0 for row in rows] == [True, False, False]
    assert [row.statistics.drafted > 0 for row in rows] == [True, False, True]
    assert {row.tokens for row in rows} == {expected.tokens}
    with Engine(generate, rows=1, capacity=64, page=8, chunk=16, drafts=["chain:4"]) as engine:
        for stated, drafts in ((None, False), ("auto", True), ("off", False), ("chain:4", True)):
            before = engine.statistics.drafted
            handle = engine.submit(PROMPT, speculation=stated, **options)
            assert handle.result(60).tokens == expected.tokens
            assert (engine.statistics.drafted > before) == drafts, stated


def test_a_speculation_that_no_call_may_state_is_refused_by_load(generator) -> None:
    arguments = generator.target, generator.drafter
    options = {"tokenizer": generator.tokenizer, "draft": "chain:4"}
    assert specjax.load(*arguments, **options, speculation="chain:4").speculation == "chain:4"
    for stated, message in (
        ("chain:99", "speculation='chain:99': give auto, off, .*, chain:4$"),
        (-1, "speculation=-1: a depth is at least 0"),
    ):
        with pytest.raises(InputError, match=message):
            specjax.load(*arguments, **options, speculation=stated)


def test_what_cannot_be_used_is_refused(generator, tmp_path) -> None:
    for prompt in ("", [], [""], [{"role": "user"}, "x"], 3, None, [[]]):
        with pytest.raises(InputError, match="prompt"):
            generator(prompt)
    with pytest.raises(InputError, match="stream takes one prompt"):
        generator.stream(["a", "b"])
    for stop in ("", [""], [3], None):
        with pytest.raises(InputError, match="stop="):
            generator("x", stop=stop)
    for call in (generator, generator.stream):
        with pytest.raises(
            InputError, match=r"temp=0\.5: .*no argument of that name; did you mean temperature"
        ):
            call("x", temp=0.5)
        with pytest.raises(InputError, match=r"max_tokens=3: .*; did you mean max_new_tokens"):
            call("x", max_tokens=3)
    for options in (
        {"seed": -1},
        {"seed": 2**63},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2**63},
        {"temperature": -1},
    ):
        with pytest.raises(InputError, match=next(iter(options))):
            generator("x", **options)
    for dtype in ("int8", "nothing", 7):
        with pytest.raises(InputError, match="dtype="):
            specjax.load("embedded", dtype=dtype)
    with pytest.raises(InputError, match="cache_dtype='int4': must be one of float, int8"):
        specjax.load("embedded", cache_dtype="int4")
    with pytest.raises(InputError, match="drafter=3"):
        specjax.load("embedded", 3)
    with (
        pytest.warns(UserWarning, match="top_p: ignored at temperature 0"),
        pytest.raises(InputError),
    ):
        generator("x", top_p=0.9, max_new_tokens=0)

    # A drafter with a vocabulary of equal size, whose tokenizer is damaged.
    tiny_target(vocab_size=3072).save_pretrained(tmp_path)
    shutil.copy(ASSETS / "target" / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "added')
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        specjax.load("embedded", tmp_path)
