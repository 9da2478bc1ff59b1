"""Find the tokens of two tokenizers that stand for the same text.

The vocabularies are made by hand and by the trainers of `tokenizers`.
"""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specjax.vocabularies import VocabularyTokens, read_as, shared_tokens, texts_of

TEXTS = [
    "the cat sat on the mat, and the cats sat there\n",
    "a naïve café: 漢字 and the end\n",
] * 20


def byte_level(size: int = 300, **special: str) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, as GPT-2 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    settings = {
        "vocab_size": size,
        "special_tokens": list(special.values()),
        "show_progress": False,
    }
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(initial_alphabet=alphabet, **settings))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def sentence_piece(size: int = 310, **special: str) -> PreTrainedTokenizerFast:
    """Train BPE over characters, as Llama 2 and Mistral have it.

    It has ▁ for spaces, and a token for every byte.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    first = ["<unk>", *special.values(), *all_bytes]
    # Only the first text: the other characters of the second are written byte by byte.
    texts = [text.replace("\n", " ") for text in TEXTS[::2]]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=first, show_progress=False)
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] not in all_bytes
    ]
    whole = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", **special)


def test_every_byte_of_byte_level_bpe() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = texts_of({character: i for i, character in enumerate(alphabet)})
    assert sorted(texts.values()) == [bytes([byte]) for byte in range(256)]
    for byte in range(128):  # whole characters, which the tokenizer writes itself
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ((character, _),) = splitter.pre_tokenize_str(chr(byte))
        assert texts[alphabet.index(character)] == bytes([byte])


def test_texts_are_what_the_tokenizers_decode() -> None:
    for tokenizer in (
        byte_level(eos_token="<end>"),
        sentence_piece(bos_token="<s>", eos_token="</s>"),
    ):
        tokens = VocabularyTokens.of(tokenizer)
        for text in TEXTS[:2]:
            encoded = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(tokens.texts[i] for i in encoded) == text.encode()
            assert tokenizer.decode(encoded) == text
        assert len(tokens.texts) + len(tokens.roles) == len(tokenizer) - (
            tokenizer.unk_token is not None
        )
        assert len(tokens) == len({*tokens.texts.values()}) + len(tokens.roles)


def test_a_trained_pair_of_both_kinds_shares_words_and_bytes() -> None:
    target, draft = byte_level(eos_token="<end>"), sentence_piece(bos_token="<s>", eos_token="</s>")
    ours, theirs = VocabularyTokens.of(target), VocabularyTokens.of(draft)
    shared = shared_tokens(ours, theirs)
    assert ours.roles == {"eos_token": 0} and theirs.roles == {"eos_token": 2, "bos_token": 1}
    assert shared[0] == 2
    assert len(set(shared.values())) == len(shared) and list(shared) == sorted(shared)
    names = target.convert_ids_to_tokens, draft.convert_ids_to_tokens
    pairs = {names[0](i): names[1](j) for i, j in shared.items()}
    assert (
        pairs["Ġthe"] == "▁the"
        and pairs["Ċ"] == "<0x0A>"
        and pairs["c"] == "c"
        and pairs["Ġ"] == "▁"
    )
    assert pairs["Ã"] == "<0xC3>"  # half of an é
    assert {ours.texts[i] for i in shared if i in ours.texts} == set(ours.by_text) & set(
        theirs.by_text
    )


def test_of_several_tokens_with_one_text_one_is_taken() -> None:
    target = VocabularyTokens(texts_of({"▁": 3, "A": 4, "<0x41>": 1, "<0x20>": 2}), {})
    draft = VocabularyTokens(texts_of({"Ġ": 7, "A": 6, "ĠĠ": 5}, added={"A": 9, "  ": 2}), {})
    assert target.by_text == {b" ": 3, b"A": 4}  # not the ids of the bytes, which are lower
    assert draft.by_text == {b"  ": 2, b" ": 7, b"A": 6}  # the lowest
    assert shared_tokens(target, draft) == {3: 7, 4: 6}
    assert shared_tokens(draft, target) == {6: 4, 7: 3}
    assert read_as(target, draft) == {1: 6, 2: 7, 3: 7, 4: 6}


def test_special_tokens_go_by_their_roles() -> None:
    words = texts_of({"Ġa": 0, "Ġb": 1})
    both = VocabularyTokens(words, {"eos_token": 5, "bos_token": 5})
    assert shared_tokens(both, VocabularyTokens(words, {"eos_token": 8, "bos_token": 9})) == {
        0: 0,
        1: 1,
        5: 8,
    }
    assert shared_tokens(VocabularyTokens(words, {"eos_token": 8, "bos_token": 9}), both) == {
        0: 0,
        1: 1,
        8: 5,
    }
    assert shared_tokens(
        VocabularyTokens(words, {"bos_token": 9}), VocabularyTokens(words, {"eos_token": 9})
    ) == {0: 0, 1: 1}
    # A word is not the same as a special token that is written like it.
    alike, plain = byte_level(eos_token="Ġthe"), byte_level(eos_token="<end>")
    tokens = VocabularyTokens.of(plain)
    shared = shared_tokens(VocabularyTokens.of(alike), tokens)
    assert shared[0] == 0 and all(tokens.texts.get(j) != b" the" for j in shared.values())


def test_added_tokens_are_written_as_they_are() -> None:
    tokenizer = byte_level(eos_token="<end>")
    before = len(tokenizer)
    tokenizer.add_tokens(["  é"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokens = VocabularyTokens.of(tokenizer)
    assert tokens.texts[before] == "  é".encode()
    assert before + 1 not in tokens.texts and before + 1 not in tokens.roles.values()


def test_special_and_added_tokens_that_are_written_alike_are_the_same() -> None:
    """Compare special and added tokens, but not words of the vocabulary, by their writing.

    It does not matter whether a tokenizer counts them as special, and which ids they have.
    """
    chat = ["<|im_start|>", "<|im_end|>", "<tool_call>"]
    target, draft = byte_level(eos_token="<end>"), sentence_piece(bos_token="<s>", eos_token="</s>")
    target.add_special_tokens({"additional_special_tokens": chat, "pad_token": "<pad>"})
    draft.add_tokens([chat[2]])  # not a special one here
    draft.add_special_tokens(
        {"additional_special_tokens": ["<mask>", *chat[1::-1]], "pad_token": "<pad>"}
    )
    ours, theirs = VocabularyTokens.of(target), VocabularyTokens.of(draft)
    shared = shared_tokens(ours, theirs)
    for token in (*chat, "<pad>"):
        assert (
            shared[target.convert_tokens_to_ids(token)]
            == draft.convert_tokens_to_ids(token)
            != draft.unk_token_id
        )
    assert shared[target.eos_token_id] == draft.eos_token_id  # these are not written alike
    assert draft.unk_token not in theirs.written and "<mask>" in theirs.written
    assert {shared[i] for i in ours.special} < theirs.special | {
        draft.convert_tokens_to_ids("<tool_call>")
    }
    assert len(set(shared.values())) == len(shared)
    assert read_as(theirs, ours)[draft.convert_tokens_to_ids("<mask>")] == ours.unknown
    word = byte_level(eos_token="<end>")
    word.add_special_tokens({"additional_special_tokens": ["the"]})
    plain = VocabularyTokens(texts_of({"the": 7}), {})
    assert (
        shared_tokens(VocabularyTokens.of(word), plain).get(word.convert_tokens_to_ids("the"))
        is None
    )


def test_of_ends_that_differ_those_that_are_written_alike_are_the_same() -> None:
    """Compare the end of a turn of a chat model with the special tokens of its base model."""
    texts = {9: b"a"}
    chat = VocabularyTokens(
        texts, {"eos_token": 1, "bos_token": 0}, written={"<|end|>": 0, "<|turn|>": 1}
    )
    base = VocabularyTokens(
        texts, {"eos_token": 5, "bos_token": 5}, written={"<|end|>": 5, "<|turn|>": 6}
    )
    assert shared_tokens(chat, base) == {0: 5, 1: 6, 9: 9}
    assert shared_tokens(base, chat) == {5: 0, 6: 1, 9: 9}
    assert len(chat) == 3


def test_ids_that_the_model_lacks_are_left_out() -> None:
    tokenizer = byte_level(eos_token="<end>")
    assert max(VocabularyTokens.of(tokenizer).texts) == len(tokenizer) - 1 > 280
    assert max(VocabularyTokens.of(tokenizer, size=280).texts) == 279
    last = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<far>")
    last.add_special_tokens({"eos_token": "<far>"})
    count = len(tokenizer)
    assert (
        VocabularyTokens.of(last).roles == {"eos_token": count}
        and VocabularyTokens.of(last, size=count).roles == {}
    )


def test_what_is_read_for_tokens_that_the_drafter_lacks() -> None:
    target = VocabularyTokens(
        texts_of({"Ġunder": 0, "Ġline": 1, "Ã©": 2, "Ċ": 3}), {"eos_token": 4, "bos_token": 5}
    )
    draft = VocabularyTokens(
        texts_of({"r": 0, "er": 1, "nder": 2, "▁line": 3, "e": 4, "<0xA9>": 5}),
        {"eos_token": 6},
        unknown=7,
    )
    assert read_as(target, draft) == {0: 2, 1: 3, 2: 5, 3: 7, 4: 6, 5: 7}
