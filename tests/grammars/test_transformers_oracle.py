"""Greedy constrained texts, compared with those of transformers and llguidance's own bindings.

Nothing of `specjax.grammars` takes part in what they are compared with, except the grammars' text.
"""

import json
from typing import Any

import numpy as np
import pytest
import transformers
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

import specjax
from specjax.drafters import EarlyExit
from specjax.drafts.shapes import DynamicTree
from specjax.grammars import GrammarCompiler
from tests.grammars.random_grammars import KINDS, random_grammars

VOCAB, NEW = 3085, 20
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
MODELS = {
    "llama": (transformers.LlamaConfig, "LlamaForCausalLM"),
    "qwen2": (transformers.Qwen2Config, "Qwen2ForCausalLM"),
}


def grammars() -> list[Any]:
    return [sample for kind in KINDS for sample in random_grammars(kind)[:3]]


def legal_only(tokenizer: Any, source: str, start: int) -> Any:
    """Return a processor that allows what a matcher of llguidance allows after ``start`` tokens."""
    from tests.with_torch import torch

    class LegalOnly(transformers.LogitsProcessor):
        def __init__(self) -> None:
            self.matcher, self.read = LLMatcher(tokenizer, source), start

        def __call__(self, ids: Any, scores: Any) -> Any:
            for token in ids[0, self.read :].tolist():
                assert self.matcher.consume_token(token)
            self.read = ids.shape[1]
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            legal = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool)
            return scores.masked_fill(~torch.from_numpy(legal)[None], -np.inf)

    return transformers.LogitsProcessorList([LegalOnly()])


@pytest.mark.thorough
@pytest.mark.parametrize("family", MODELS)
def test_greedy_texts_are_those_of_transformers(family, tmp_path) -> None:
    from tests.with_torch import torch

    config, name = MODELS[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    tokenizer = specjax.load("embedded").tokenizer
    ours = GrammarCompiler(tokenizer, VOCAB)
    theirs = from_tokenizer(tokenizer, n_vocab=VOCAB, eos_token=0)
    prompts = np.random.default_rng(0).integers(2, 3072, (len(grammars()), 6))
    expected = []
    for prompt, sample in zip(prompts, grammars(), strict=True):
        output = model.generate(
            torch.tensor(prompt[None]),
            attention_mask=torch.ones((1, 6)),
            max_new_tokens=NEW,
            do_sample=False,
            logits_processor=legal_only(theirs, sample.grammar.source, 6),
        )
        expected.append(output[0, 6:].tolist())
    assert sum(text[-1] == 0 for text in expected) > 5  # texts that end
    target = specjax.Target.from_pretrained(tmp_path)
    for drafter in (None, EarlyExit(layers=1, draft=DynamicTree(top_k=3, depth=3, nodes=9))):
        result = specjax.generate(
            target,
            drafter,
            prompts,
            max_new_tokens=NEW,
            eos_token_ids=(0,),
            grammar=[ours.compile(sample.grammar) for sample in grammars()],
        )
        texts = [
            row[6:length].tolist()
            for row, length in zip(result.tokens, result.lengths, strict=True)
        ]
        assert texts == expected
        for text, sample, completed in zip(
            texts, grammars(), result.grammar_completed, strict=True
        ):
            if completed:
                decoded = tokenizer.decode(text, skip_special_tokens=True)
                assert sample.accepts(decoded), json.dumps([str(sample.source), decoded])
