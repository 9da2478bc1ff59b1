"""Draft models whose tokenizer is another one than the target's: the text is the target's, whatever they could not read."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specjax
from specjax import progress, text
from specjax.cli.main import main
from specjax.drafters import DraftModel, WithPrediction
from specjax.drafters.cache_schemes import Streaming
from specjax.drafters.registry import load_drafter
from specjax.drafters.shared_vocabulary import SharedVocabulary, share
from specjax.drafts.shapes import Chain, DraftShape, SampledTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from specjax.vocabularies import VocabularyTokens
from tests.conftest import FEW_TOKENS, SHAPES, SHARED, outputs, tiny_target
from tests.test_vocabularies import byte_level, sentence_piece

PROMPTS = np.array([[1, 4, 2, 4, 2, 7], [3, 0, 0, 0, 0, 0], [5, 9, 10, 0, 0, 0]])
LENGTHS = np.array([6, 1, 3])
KEYS = jax.random.split(jax.random.key(2), 3)
NEW = 24
run = partial(specjax.generate, max_new_tokens=NEW, eos_token_ids=(), rule="coupled", key=KEYS)


def permuted(model: Target, ids: list[int], **settings) -> DraftModel:
    """``model`` in a vocabulary of its own: its i-th token is the one that it called ``ids[i]``, and it lacks all others."""
    rows = np.array(ids)
    parts = {"embed": model.params["embed"][rows]}
    if not model.config.tie_embeddings:
        parts["lm_head"] = model.params["lm_head"][:, rows]
    own = model.replace(
        params=model.params | parts, config=replace(model.config, vocab_size=len(ids))
    )
    texts = {i: f"token {i}".encode() for i in range(model.config.vocab_size)}
    shared = SharedVocabulary.of(
        VocabularyTokens(texts, {}),
        VocabularyTokens({i: texts[token] for i, token in enumerate(ids)}, {}),
    )
    return DraftModel(own, shared=shared, **settings)


def shuffled(tokens) -> list[int]:
    return np.random.default_rng(0).permutation(sorted(tokens)).tolist()


# --- the target's own weights under another vocabulary --------------------------------------------


@pytest.fixture(scope="module")
def varied() -> Target:
    """So many tokens that a text leaves most of them out."""
    return tiny_target(vocab_size=200)


@pytest.mark.full_except("static-0.8")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["chain", "static"])
@pytest.mark.represents("drafters with another vocabulary")
def test_every_draft_is_accepted_where_the_text_keeps_to_shared_tokens(
    varied, shape, temperature
) -> None:
    sampling = Sampling(temperature=temperature)
    plain = run(varied, None, PROMPTS, LENGTHS, sampling=sampling)
    used = {token for row in outputs(plain) for token in row}
    dropped = set(shuffled(set(range(200)) - used)[:60])
    drafter = permuted(varied, shuffled(set(range(200)) - dropped), draft=SHAPES[shape])
    result = run(varied, drafter, PROMPTS, LENGTHS, sampling=sampling)
    assert outputs(result) == outputs(plain)
    assert (
        result.stats.steps.tolist() == [NEW / 4] * 3
    )  # three drafted tokens and one more, in every step


@pytest.mark.full
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(s, marks=[pytest.mark.thorough] * (s not in ("chain", "dynamic")))
        for s in SHAPES
    ],
)
def test_text_with_tokens_that_the_drafter_lacks_is_the_targets_too(varied, shape) -> None:
    sampling = Sampling(temperature=np.array([0.8, 0.0, 1.3]), top_p=np.array([1.0, 1.0, 0.9]))
    plain = run(varied, None, PROMPTS, LENGTHS, sampling=sampling)
    used = {token for row in outputs(plain) for token in row}
    drafter = permuted(
        varied, shuffled(set(range(200)) - set(shuffled(used)[::6])), draft=SHAPES[shape]
    )
    result = run(varied, drafter, PROMPTS, LENGTHS, sampling=sampling)
    assert outputs(result) == outputs(plain)
    assert NEW / 4 < result.stats.steps.max() < NEW and result.stats.accepted.min() > 0
    lacking = set(shuffled(used)[::6])
    assert any(token in lacking for row in outputs(result) for token in row)


def test_what_it_drafts_and_reads(varied) -> None:
    """Against the model itself: its logits of the tokens that both have, after the tokens as it knows them."""
    ids = shuffled(range(0, 200, 2))
    drafter = permuted(varied, ids, draft=Chain(2))
    shared = drafter.shared
    assert shared.ids.tolist() == list(range(0, 200, 2))
    tokens = jnp.array([[2, 8, 150, 6]])
    logits = drafter.model.forward(shared.read(tokens))[0].logits
    np.testing.assert_allclose(
        shared.narrow(logits), varied.forward(tokens)[0].logits[..., shared.ids], atol=1e-4
    )
    lacking = shared.read(
        jnp.array([3, 199, 4_000])
    )  # a token, the last one, and what is only padding
    assert lacking.tolist() == [shared.unknown] * 3


@pytest.mark.full
@pytest.mark.parametrize("kind", ["with a prediction", "in a ring"])
def test_it_goes_with_what_goes_with_draft_models(varied, kind) -> None:
    sampling = Sampling(temperature=0.8)
    plain = run(varied, None, PROMPTS, LENGTHS, sampling=sampling)
    drafter = permuted(varied, shuffled(range(0, 200, 2)), draft=Chain(3))
    if kind == "with a prediction":
        predicted = [
            row[length : length + 12] for row, length in zip(outputs(plain), LENGTHS, strict=True)
        ]
        drafter = WithPrediction(drafter, jnp.asarray(predicted), longest=3)
    else:
        drafter = replace(drafter, cache=Streaming(sinks=1), budget=12)
    result = run(varied, drafter, PROMPTS, LENGTHS, sampling=sampling)
    assert outputs(result) == outputs(plain)
    assert result.stats.accepted.sum() > 0


# --- the contract, and the exact distribution -----------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "shape",
    [
        "chain",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in SHAPES if each != "chain"),
    ],
)
def test_the_contract(target, shape) -> None:
    drafter = permuted(
        tiny_target(seed=5, num_layers=1), [7, 0, 10, 3, 1, 8, 4], draft=SHAPES[shape]
    )
    conformance.check(target, drafter, come_and_go=False)


@pytest.mark.thorough
def test_texts_may_come_and_go(target) -> None:
    drafter = permuted(tiny_target(seed=5, num_layers=1), [7, 0, 10, 3, 1, 8, 4], draft=Chain(1))
    conformance.check_rows_that_come_and_go(target, drafter)


DRAWN: list = [(Chain(2), "independent")]
DRAWN += [
    pytest.param(Chain(2), rule, marks=pytest.mark.thorough)
    for rule in ("rejection", "block", "coupled")
]
DRAWN += [pytest.param(SampledTree((3, 2)), "independent", marks=pytest.mark.thorough)]


@pytest.mark.full
@pytest.mark.parametrize("draws", [25_000, pytest.param(500_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("shape", "rule"), DRAWN)
def test_drawn_tokens_keep_the_exact_distribution(shape: DraftShape, rule, draws) -> None:
    """Also by rules that read q: it lies on the shared tokens alone."""
    few = tiny_target(seed=2, scale=12.0, **FEW_TOKENS)
    drafter = permuted(tiny_target(seed=5, num_layers=1, **FEW_TOKENS), [3, 0, 2], draft=shape)
    conformance.check_distribution(few, drafter, rule=rule, draws=draws)


# --- two tokenizers -------------------------------------------------------------------------------


def save(model: Target, tokenizer, directory: Path) -> str:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, str]:
    """Directories of a target with byte-level BPE and of a draft model with SentencePiece's kind; their words are alike."""
    root = tmp_path_factory.mktemp("two")
    ours, theirs = byte_level(eos_token="<end>"), sentence_piece(bos_token="<s>", eos_token="</s>")
    target, draft = (
        tiny_target(vocab_size=304),
        tiny_target(seed=5, num_layers=1, vocab_size=len(theirs)),
    )
    return save(target, ours, root / "target"), save(draft, theirs, root / "draft")


def words(*known: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a few words."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{word: i for i, word in enumerate(known, 2)}}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def foreign(pair, tmp_path_factory) -> str:
    """A draft model that has three tokens of eight from the target."""
    return save(
        tiny_target(seed=5, num_layers=1, vocab_size=8),
        words("zebra", "b", "yak", "gnu", "emu", "e"),
        tmp_path_factory.mktemp("few") / "draft",
    )


SAID = (
    r"tokenizers differ: drafting with \d+ tokens that both have: \d+% of the drafter's \d+, \d+%"
    r" of the target's 293"
)


@pytest.mark.full
def test_sampled_text_of_different_tokenizers_is_plain_text(pair) -> None:
    target, draft = pair
    plain = specjax.load(target)
    with pytest.warns(UserWarning, match=SAID):
        drafted = specjax.load(target, draft, draft="chain:3")
    assert drafted.drafter.shared.overlap > 0.5
    for temperature in (0.8, 0.0):
        options = {
            "max_new_tokens": 20,
            "temperature": temperature,
            "key": KEYS[0],
            "rule": "coupled",
            "eos_token_ids": (),
        }
        expected = plain("the cat sat on a café\n", **options)
        made = drafted("the cat sat on a café\n", **options)
        assert made.tokens == expected.tokens and made.text == expected.text
        assert made.statistics.drafted > 0


@pytest.mark.full
def test_through_generate(pair) -> None:
    target = Target.from_pretrained(pair[0], dtype=np.float32)
    drafter = DraftModel.from_pretrained(
        pair[1],
        draft=SHAPES["dynamic"],
        dtype=np.float32,
        tokenizer=pair[0],
        vocabulary="intersect",
    )
    assert drafter.shared.ids.shape[0] == drafter.shared.columns.shape[0] < 304
    for temperature in (0.0, 0.8):
        made, plain = (
            run(target, each, PROMPTS, LENGTHS, sampling=Sampling(temperature=temperature))
            for each in (drafter, None)
        )
        assert outputs(made) == outputs(plain)


def test_ends_of_texts_are_translated(pair) -> None:
    ours, theirs = (text.load_tokenizer(Path(each)) for each in pair)
    shared = share(ours, theirs, "intersect")
    (at,) = np.flatnonzero(np.asarray(shared.ids) == ours.eos_token_id)
    assert shared.columns[at] == theirs.eos_token_id
    assert shared.read(jnp.array(ours.encode(" the cat"))).tolist() == theirs.encode(
        " the cat", add_special_tokens=False
    )


@pytest.mark.full
def test_a_token_that_ends_the_text_too_early_is_not_drafted(pair) -> None:
    """``min_new_tokens`` reaches the draft model's column of the target's end."""
    target = Target.from_pretrained(pair[0], dtype=np.float32)
    drafter = DraftModel.from_pretrained(
        pair[1], dtype=np.float32, tokenizer=pair[0], vocabulary="intersect"
    )
    settings = {
        "eos_token_ids": tuple(range(0, 304, 2)),
        "min_new_tokens": 10,
        "sampling": Sampling(temperature=0.8),
    }
    made, plain = (
        specjax.generate(
            target, each, PROMPTS, LENGTHS, max_new_tokens=NEW, key=KEYS, rule="coupled", **settings
        )
        for each in (drafter, None)
    )
    assert outputs(made) == outputs(plain)


def test_few_tokens_in_common_are_refused_unless_asked_for(pair, foreign, tmp_path) -> None:
    tokenizer, config = text.load_tokenizer(Path(pair[0])), Target.from_pretrained(pair[0]).config
    unread = tmp_path / "unread"
    text.copy_tokenizer(Path(foreign), into=_made(unread))
    (unread / "config.json").write_bytes((Path(foreign) / "config.json").read_bytes())
    (unread / "model.safetensors").write_bytes(b"never read")
    message = (
        "tokenizers: 3 tokens that both have: 43% of the drafter's 7, 1% of the target's 293. Below"
        " 50% of the smaller vocabulary few drafts are accepted: take a drafter of the target's"
        " family, or ask for this one by name, --drafter draft-model-intersect:WHERE"
        ' (vocabulary="intersect" in Python)'
    )
    for refused in (
        lambda: load_drafter(str(unread), None, config, tokenizer=tokenizer),
        lambda: load_drafter(f"draft-model:{unread}", None, config, tokenizer=tokenizer),
        lambda: specjax.load(pair[0], str(unread)),
        lambda: DraftModel.from_pretrained(unread, tokenizer=pair[0]),
    ):
        with pytest.raises(InputError) as caught:
            refused()
        assert str(caught.value) == message
    named = load_drafter(
        f"draft-model-intersect:{foreign}", Chain(2), config, tokenizer=tokenizer
    )  # and nothing is warned of
    loaded = DraftModel.from_pretrained(
        foreign, draft=Chain(2), tokenizer=tokenizer, vocabulary="intersect"
    )
    for drafter in (named, loaded):
        assert drafter.shared.ids.shape == (3,) and drafter.shared.overlap == pytest.approx(3 / 7)
    with pytest.raises(InputError, match="no token in common"):
        share(tokenizer, words("zebra"), "intersect")


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_one_tokenizer_is_no_translation(tiny_pair, tmp_path) -> None:
    tokenizer = text.load_tokenizer(Path(tiny_pair[0]))
    config = Target.from_pretrained(tiny_pair[0]).config
    for name in (tiny_pair[1], f"draft-model-intersect:{tiny_pair[1]}"):
        assert load_drafter(name, None, config, tokenizer=tokenizer).shared is None
    assert (
        DraftModel.from_pretrained(
            tiny_pair[1], tokenizer=tiny_pair[0], vocabulary="intersect"
        ).shared
        is None
    )


def test_bad_arguments_are_refused_by_name(pair, foreign) -> None:
    with pytest.raises(InputError, match=r"vocabulary='union': give \"intersect\", or None"):
        DraftModel.from_pretrained(pair[1], tokenizer=pair[0], vocabulary="union")
    with pytest.raises(
        InputError,
        match=(
            r"vocabulary='intersect': give tokenizer=TARGET, the directory or hub id of the target"
        ),
    ):
        DraftModel.from_pretrained(pair[1], vocabulary="intersect")
    drafter = DraftModel.from_pretrained(
        pair[1], dtype=np.float32, tokenizer=pair[0], vocabulary="intersect"
    )
    with pytest.raises(
        InputError,
        match=(
            r"tokenizer: target has a vocabulary of 11 tokens, but its tokenizer has an id \d+:"
            r" give"
        ),
    ):
        specjax.generate(tiny_target(), drafter, [[1]])
    few = DraftModel.from_pretrained(
        foreign,
        draft=SHAPES["dynamic"],
        dtype=np.float32,
        tokenizer=pair[0],
        vocabulary="intersect",
    )
    few = replace(few, draft=specjax.DynamicTree(top_k=4, depth=2, nodes=6))
    with pytest.raises(InputError, match="3 tokens"):
        specjax.generate(Target.from_pretrained(pair[0], dtype=np.float32), few, [[1]])


@pytest.mark.full
def test_the_command_line_says_it_in_a_line(pair, foreign, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "_display", progress._Nothing())
    command = [
        "generate",
        "--target",
        pair[0],
        "--prompt",
        "the cat",
        "--max-new-tokens",
        "4",
        "--drafter",
    ]
    assert main([*command, pair[1]]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "tokenizers differ" in line]
    assert len(lines) == 1 and lines[0].startswith("specjax: tokenizers differ: drafting with ")
    assert main([*command, "none"]) == 0
    assert capsys.readouterr().out == out
    assert main([*command, f"draft-model-intersect:{foreign}"]) == 0
    again = capsys.readouterr()
    assert again.out == out and "drafting with 3 tokens that both have" in again.err
    assert main([*command, foreign]) == 2
    assert "ask for this one by name" in capsys.readouterr().err


# --- chats ----------------------------------------------------------------------------------------

TURNS = ("<|im_start|>", "<|im_end|>")
SAME_WORDS = [f"w{i}" for i in range(60)]
CHAT = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def of_chats(order: list[str], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words and of what begins and ends a turn, whose ids are their places in ``order``."""
    model = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(order)}, unk_token="<unk>")
    )
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", **special)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TURNS)})
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_a_chat_special_tokens_that_both_have_are_read_and_drafted(
    temperature, tmp_path, monkeypatch
) -> None:
    """The draft model is the target itself under other ids: what it accepts less than all of is what it could not read."""
    words_of_target = ["<unk>", *TURNS, "user", "assistant", *SAME_WORDS]
    order = np.random.default_rng(3).permutation(len(words_of_target) - 1) + 1
    words_of_draft = ["<unk>", *(words_of_target[i] for i in order)]
    model = tiny_target(vocab_size=len(words_of_target))
    own = permuted(model, [0, *order.tolist()]).model
    ends = {"eos_token": TURNS[1]}
    target, draft = (
        save(model, of_chats(words_of_target, **ends), tmp_path / "target"),
        tmp_path / "draft",
    )
    save(own, of_chats(words_of_draft, **ends), draft)
    turns = ["w3 w9 w17", "w4 w40", "w11 w3 w3 w25"]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
    ]
    options = {
        "max_new_tokens": NEW, "temperature": temperature, "key": KEYS[0], "rule": "coupled", "eos_token_ids": (),
    }  # fmt: skip
    expected = specjax.load(target)(messages, **options)

    def steps() -> int:
        with pytest.warns(UserWarning, match="tokenizers differ"):
            drafted = specjax.load(target, str(draft), draft="chain:3")
        result = drafted(messages, **options)
        assert result.tokens == expected.tokens and result.text == expected.text
        return int(result.statistics.steps)

    assert steps() == NEW // 4  # every drafted token is accepted
    by_roles_alone = VocabularyTokens.of
    monkeypatch.setattr(
        VocabularyTokens, "of", lambda *given: replace(by_roles_alone(*given), written={})
    )
    assert steps() > NEW // 4 + 3


# --- trained models -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.skipif(not (SHARED / "stories260k").is_dir(), reason="needs ../shared/data")
def test_trained_models_of_different_tokenizers() -> None:
    """Python source by byte-level BPE, drafted for by a model of stories with SentencePiece."""
    plain = specjax.load("embedded")
    with pytest.warns(
        UserWarning, match="drafting with 376 tokens that both have: 89% of the drafter's 422"
    ):
        drafted = specjax.load("embedded", str(SHARED / "stories260k"), draft="chain:3")
    options = {"max_new_tokens": 40, "temperature": 0.8, "key": KEYS[0], "rule": "coupled"}
    assert (
        drafted("import os\nimport ", **options).tokens
        == plain("import os\nimport ", **options).tokens
    )


@pytest.mark.skipif(not (SHARED / "stories260k").is_dir(), reason="needs ../shared/data")
@pytest.mark.full
def test_a_trained_model_drafts_for_itself_in_another_vocabulary(tmp_path) -> None:
    """Its tokens have other ids, and those that it does not need are gone, from its tokenizer too."""
    directory = SHARED / "stories260k"
    model, tokenizer = (
        Target.from_pretrained(directory, dtype=np.float32),
        text.load_tokenizer(directory),
    )
    prompt = np.array([text.encode(tokenizer, "Once upon a time, there was a little girl")])
    plain = specjax.generate(model, None, prompt, max_new_tokens=60, eos_token_ids=())
    kept = set(outputs(plain)[0]) | set(range(0, 512, 2)) | {0, 1, 2}
    order = [0, 1, 2, *shuffled(kept - {0, 1, 2})]
    content = json.loads((directory / "tokenizer.json").read_text())
    names = {i: token for token, i in content["model"]["vocab"].items()}
    content["model"]["vocab"] = {names[old]: new for new, old in enumerate(order)}
    known = content["model"]["vocab"]
    merges = [
        each if isinstance(each, list) else each.split(" ") for each in content["model"]["merges"]
    ]
    content["model"]["merges"] = [each for each in merges if {*each, "".join(each)} <= known.keys()]
    own = permuted(model, order).model
    own.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_bytes(
        (directory / "tokenizer_config.json").read_bytes()
    )
    drafter = DraftModel.from_pretrained(
        tmp_path, draft=Chain(4), dtype=np.float32, tokenizer=directory, vocabulary="intersect"
    )
    assert drafter.shared.ids.shape[0] < 400
    result = specjax.generate(model, drafter, prompt, max_new_tokens=60, eos_token_ids=())
    assert outputs(result) == outputs(plain)
    assert result.stats.steps.tolist() == [12]  # five tokens in every step
