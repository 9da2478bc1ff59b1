"""`transformers` on the same weights: greedy, assisted by a draft model, and prompt lookup."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError

ONE_ROW = ("transformers, assisted", "transformers, prompt lookup")
"""Methods that take one row at a time."""


def methods(target: Path, draft: Path, new_tokens: int) -> dict[str, Any]:
    """`benchmarks.decode.Method`s by name. Those of `ONE_ROW` take prompts ``[1, P]``."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise InputError("compare: torch is not installed; install it (pip install torch) or pass --no-compare") from None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    for each in (model, assistant):
        each.generation_config.eos_token_id = None  # as many tokens as asked for
        each.generation_config.pad_token_id = 0

    def method(**options: Any) -> Any:
        def generate(prompts: np.ndarray) -> dict[str, Any]:
            started = time.perf_counter()
            with torch.inference_mode():
                tokens = model.generate(
                    torch.as_tensor(prompts),
                    attention_mask=torch.ones(prompts.shape, dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    **options,
                )
            seconds = time.perf_counter() - started
            return {"seconds": seconds, "tokens": tokens.numpy(), "width": prompts.shape[1] + new_tokens}

        return generate

    return {
        "transformers, greedy": method(),
        "transformers, assisted": method(assistant_model=assistant),
        "transformers, prompt lookup": method(prompt_lookup_num_tokens=8),
    }
