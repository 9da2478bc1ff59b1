"""Run Ray's processor of HTTP requests on a server of ours, and print the answers as JSON.

This is the recipe of docs/guides/clusters.md.

    python -m tests.ray_over_http URL

The answers are in the order of the prompts.
"""

import json
import sys
from typing import Any

PROMPTS = [f"def function_{number}(" for number in range(24)]


def payload(prompt: str) -> dict[str, Any]:
    """Return the body of a request, which is the same each time."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": PROMPTS.index(prompt),
    }


def main(url: str) -> None:
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = HttpRequestProcessorConfig(
        url=f"{url}/v1/completions", batch_size=1, concurrency=2, max_retries=5
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {"payload": payload(row["prompt"])},
        postprocess=lambda row: {
            "prompt": row["prompt"],
            "answer": row["http_response"]["choices"][0]["text"],
        },
    )
    rows = processor(
        ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS], override_num_blocks=4)
    ).take_all()
    ray.shutdown()
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert len(rows) == len(PROMPTS)
    print(json.dumps([answers[prompt] for prompt in PROMPTS]))


if __name__ == "__main__":
    main(*sys.argv[1:])
