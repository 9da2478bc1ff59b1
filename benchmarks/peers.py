"""`transformers` on the same weights: greedy, assisted by a draft model, and prompt lookup."""

import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.errors import InputError

ONE_ROW = ("transformers, assisted", "transformers, prompt lookup")
"""The methods that support only one row."""


def methods(target: Path, draft: Path, new_tokens: int, dtype: str) -> dict[str, Any]:
    """Return `benchmarks.decode.Runner`s by name, on the same kind of device as ours.

    Those of `ONE_ROW` take prompts ``[1, P]``.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise InputError(
            "compare: torch is not installed; install it (pip install torch) or pass --no-compare"
        ) from None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    kind = getattr(torch, dtype)
    model = (
        AutoModelForCausalLM.from_pretrained(target, dtype=kind, trust_remote_code=False)
        .eval()
        .to(device)
    )
    assistant = (
        AutoModelForCausalLM.from_pretrained(draft, dtype=kind, trust_remote_code=False)
        .eval()
        .to(device)
    )
    for model_of_peer in (model, assistant):
        model_of_peer.generation_config.eos_token_id = None  # as many tokens as asked for
        model_of_peer.generation_config.pad_token_id = 0

    def method(**options: Any) -> Any:
        def generate(prompts: np.ndarray) -> dict[str, Any]:
            started = time.perf_counter()
            with torch.inference_mode():
                tokens = model.generate(
                    torch.as_tensor(prompts, device=device),
                    attention_mask=torch.ones(prompts.shape, dtype=torch.long, device=device),
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    **options,
                )
            tokens = tokens.cpu().numpy()
            return {
                "seconds": time.perf_counter() - started,
                "tokens": tokens,
                "width": prompts.shape[1] + new_tokens,
            }

        return generate

    return {
        "transformers, greedy": method(),
        "transformers, assisted": method(assistant_model=assistant),
        "transformers, prompt lookup": method(prompt_lookup_num_tokens=8),
    }
