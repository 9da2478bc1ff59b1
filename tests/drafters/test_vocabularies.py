"""Test draft models with another tokenizer than the target's.

The text is the target's, even if the draft model cannot read some of its tokens.
"""

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
    """Return ``model`` with a vocabulary of its own.

    Its i-th token is the token ``ids[i]`` of ``model``, and it lacks all other tokens.
    """
    rows = np.array(ids)
    parts = {"embed": model.params["embed"][rows]}
    if not model.config.tie_embeddings:
        parts["lm_head"] = model.params["lm_head"][:, rows]
    reordered = model.replace(
        params=model.params | parts, config=replace(model.config, vocab_size=len(ids))
    )
    texts = {i: f"token {i}".encode() for i in range(model.config.vocab_size)}
    shared = SharedVocabulary.of(
        VocabularyTokens(texts, {}),
        VocabularyTokens({i: texts[token] for i, token in enumerate(ids)}, {}),
    )
    return DraftModel(reordered, shared=shared, **settings)


def shuffled(tokens) -> list[int]:
    return np.random.default_rng(0).permutation(sorted(tokens)).tolist()


# --- the target's own weights under another vocabulary --------------------------------------------


@pytest.fixture(scope="module")
def varied() -> Target:
    """Return a target with so many tokens that most of them do not occur in a text."""
    return tiny_target(vocab_size=200)


@pytest.mark.full
@pytest.mark.thorough_except("chain-0.0")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["chain", "static"])
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
    # Every step emits three drafted tokens and the bonus token.
    assert result.stats.steps.tolist() == [NEW / 4] * 3


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
    """Compare with the model's own logits of the shared tokens.

    The model reads the tokens by their ids in its own vocabulary.
    """
    ids = shuffled(range(0, 200, 2))
    drafter = permuted(varied, ids, draft=Chain(2))
    shared = drafter.shared
    assert shared.ids.tolist() == list(range(0, 200, 2))
    tokens = jnp.array([[2, 8, 150, 6]])
    logits = drafter.model.forward(shared.read(tokens))[0].logits
    np.testing.assert_allclose(
        shared.narrow(logits), varied.forward(tokens)[0].logits[..., shared.ids], atol=1e-4
    )
    # A token, the last token, and an id of padding.
    lacking = shared.read(jnp.array([3, 199, 4_000]))
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
        *(pytest.param(name, marks=pytest.mark.thorough) for name in SHAPES if name != "chain"),
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


DRAWS: list = [(Chain(2), "independent")]
DRAWS += [
    pytest.param(Chain(2), rule, marks=pytest.mark.thorough)
    for rule in ("rejection", "block", "coupled")
]
DRAWS += [pytest.param(SampledTree((3, 2)), "independent", marks=pytest.mark.thorough)]


@pytest.mark.full
@pytest.mark.parametrize("draws", [25_000, pytest.param(500_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("shape", "rule"), DRAWS)
def test_drawn_tokens_keep_the_exact_distribution(shape: DraftShape, rule, draws) -> None:
    """Check rules that read q, too: it is above 0 only for shared tokens."""
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
    """Return the directories of a target and of a draft model.

    The target's tokenizer is byte-level BPE, and the draft model's is of SentencePiece's kind. They
    have similar words.
    """
    root = tmp_path_factory.mktemp("two")
    ours, theirs = byte_level(eos_token="<end>"), sentence_piece(bos_token="<s>", eos_token="</s>")
    target = tiny_target(vocab_size=304)
    draft = tiny_target(seed=5, num_layers=1, vocab_size=len(theirs))
    return save(target, ours, root / "target"), save(draft, theirs, root / "draft")


def words(*vocabulary: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words."""
    ids = {"<unk>": 0, "</s>": 1, **{word: i for i, word in enumerate(vocabulary, 2)}}
    model = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def foreign(pair, tmp_path_factory) -> str:
    """Return a draft model that shares three of its eight tokens with the target."""
    return save(
        tiny_target(seed=5, num_layers=1, vocab_size=8),
        words("zebra", "b", "yak", "gnu", "emu", "e"),
        tmp_path_factory.mktemp("few") / "draft",
    )


WARNING = (
    r"tokenizers differ: drafting with \d+ tokens that both have: \d+% of the drafter's \d+, \d+%"
    r" of the target's 293"
)


@pytest.mark.thorough
def test_sampled_text_of_different_tokenizers_is_plain_text(pair) -> None:
    target, draft = pair
    plain = specjax.load(target)
    with pytest.warns(UserWarning, match=WARNING):
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
        result = drafted("the cat sat on a café\n", **options)
        assert result.tokens == expected.tokens and result.text == expected.text
        assert result.statistics.drafted > 0


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
        sampling = Sampling(temperature=temperature)
        drafted = run(target, drafter, PROMPTS, LENGTHS, sampling=sampling)
        plain = run(target, None, PROMPTS, LENGTHS, sampling=sampling)
        assert outputs(drafted) == outputs(plain)


def test_ends_of_texts_are_translated(pair) -> None:
    ours, theirs = (text.load_tokenizer(Path(directory)) for directory in pair)
    shared = share(ours, theirs, "intersect")
    (at,) = np.flatnonzero(np.asarray(shared.ids) == ours.eos_token_id)
    assert shared.columns[at] == theirs.eos_token_id
    expected = theirs.encode(" the cat", add_special_tokens=False)
    assert shared.read(jnp.array(ours.encode(" the cat"))).tolist() == expected


@pytest.mark.full
def test_a_token_that_ends_the_text_too_early_is_not_drafted(pair) -> None:
    """Check that ``min_new_tokens`` reaches the draft model's columns of the stop tokens."""
    target = Target.from_pretrained(pair[0], dtype=np.float32)
    drafter = DraftModel.from_pretrained(
        pair[1], dtype=np.float32, tokenizer=pair[0], vocabulary="intersect"
    )
    settings = {
        "eos_token_ids": tuple(range(0, 304, 2)),
        "min_new_tokens": 10,
        "sampling": Sampling(temperature=0.8),
    }
    settings |= {"max_new_tokens": NEW, "key": KEYS, "rule": "coupled"}
    drafted = specjax.generate(target, drafter, PROMPTS, LENGTHS, **settings)
    plain = specjax.generate(target, None, PROMPTS, LENGTHS, **settings)
    assert outputs(drafted) == outputs(plain)


def test_few_tokens_in_common_are_refused_unless_asked_for(pair, foreign, tmp_path) -> None:
    tokenizer, config = text.load_tokenizer(Path(pair[0])), Target.from_pretrained(pair[0]).config
    unread = tmp_path / "unread"
    text.copy_tokenizer(Path(foreign), into=_created(unread))
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
    # A drafter that is asked for by this name causes no warning.
    named = load_drafter(f"draft-model-intersect:{foreign}", Chain(2), config, tokenizer=tokenizer)
    loaded = DraftModel.from_pretrained(
        foreign, draft=Chain(2), tokenizer=tokenizer, vocabulary="intersect"
    )
    for drafter in (named, loaded):
        assert drafter.shared.ids.shape == (3,) and drafter.shared.overlap == pytest.approx(3 / 7)
    with pytest.raises(InputError, match="no token in common"):
        share(tokenizer, words("zebra"), "intersect")


def _created(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_one_tokenizer_is_no_translation(tiny_pair, tmp_path) -> None:
    tokenizer = text.load_tokenizer(Path(tiny_pair[0]))
    config = Target.from_pretrained(tiny_pair[0]).config
    for name in (tiny_pair[1], f"draft-model-intersect:{tiny_pair[1]}"):
        assert load_drafter(name, None, config, tokenizer=tokenizer).shared is None
    drafter = DraftModel.from_pretrained(
        tiny_pair[1], tokenizer=tiny_pair[0], vocabulary="intersect"
    )
    assert drafter.shared is None


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
    command = ["generate", "--target", pair[0], "--prompt", "the cat"]
    command += ["--max-new-tokens", "4", "--drafter"]
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
    """Return a tokenizer of words and of the tokens that begin and end a turn.

    The id of a word is its place in ``order``.
    """
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
    """Test with a draft model that is the target itself under other ids.

    All drafted tokens are accepted, unless the draft model could not read some tokens.
    """
    words_of_target = ["<unk>", *TURNS, "user", "assistant", *SAME_WORDS]
    order = np.random.default_rng(3).permutation(len(words_of_target) - 1) + 1
    words_of_draft = ["<unk>", *(words_of_target[i] for i in order)]
    model = tiny_target(vocab_size=len(words_of_target))
    reordered = permuted(model, [0, *order.tolist()]).model
    ends = {"eos_token": TURNS[1]}
    target = save(model, of_chats(words_of_target, **ends), tmp_path / "target")
    draft = save(reordered, of_chats(words_of_draft, **ends), tmp_path / "draft")
    turns = ["w3 w9 w17", "w4 w40", "w11 w3 w3 w25"]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
    ]
    options = {
        "max_new_tokens": NEW,
        "temperature": temperature,
        "key": KEYS[0],
        "rule": "coupled",
        "eos_token_ids": (),
    }
    expected = specjax.load(target)(messages, **options)

    def steps() -> int:
        with pytest.warns(UserWarning, match="tokenizers differ"):
            drafted = specjax.load(target, draft, draft="chain:3")
        result = drafted(messages, **options)
        assert result.tokens == expected.tokens and result.text == expected.text
        return int(result.statistics.steps)

    assert steps() == NEW // 4  # every drafted token is accepted
    original = VocabularyTokens.of
    monkeypatch.setattr(
        VocabularyTokens, "of", lambda *arguments: replace(original(*arguments), written={})
    )
    assert steps() > NEW // 4 + 3


# --- trained models -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.skipif(not (SHARED / "stories260k").is_dir(), reason="needs ../shared/data")
def test_trained_models_of_different_tokenizers() -> None:
    """Test tokenizers of different kinds.

    The target writes Python source with byte-level BPE; the draft model is trained on stories, and
    its tokenizer is SentencePiece's.
    """
    plain = specjax.load("embedded")
    with pytest.warns(
        UserWarning, match="drafting with 376 tokens that both have: 89% of the drafter's 422"
    ):
        drafted = specjax.load("embedded", str(SHARED / "stories260k"), draft="chain:3")
    options = {"max_new_tokens": 40, "temperature": 0.8, "key": KEYS[0], "rule": "coupled"}
    prompt = "import os\nimport "
    assert drafted(prompt, **options).tokens == plain(prompt, **options).tokens


@pytest.mark.skipif(not (SHARED / "stories260k").is_dir(), reason="needs ../shared/data")
@pytest.mark.full
def test_a_trained_model_drafts_for_itself_in_another_vocabulary(tmp_path) -> None:
    """Check a draft model whose tokens have other ids.

    It lacks the tokens that it does not need, as does its tokenizer.
    """
    directory = SHARED / "stories260k"
    model = Target.from_pretrained(directory, dtype=np.float32)
    tokenizer = text.load_tokenizer(directory)
    prompt = np.array([text.encode(tokenizer, "Once upon a time, there was a little girl")])
    plain = specjax.generate(model, None, prompt, max_new_tokens=60, eos_token_ids=())
    needed = set(outputs(plain)[0]) | set(range(0, 512, 2)) | {0, 1, 2}
    order = [0, 1, 2, *shuffled(needed - {0, 1, 2})]
    content = json.loads((directory / "tokenizer.json").read_text())
    names = {i: token for token, i in content["model"]["vocab"].items()}
    vocabulary = {names[old]: new for new, old in enumerate(order)}
    content["model"]["vocab"] = vocabulary
    merges = [
        merge if isinstance(merge, list) else merge.split(" ")
        for merge in content["model"]["merges"]
    ]
    content["model"]["merges"] = [
        merge for merge in merges if {*merge, "".join(merge)} <= vocabulary.keys()
    ]
    permuted(model, order).model.save_pretrained(tmp_path)
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
