"""A test from `specjax train` to `specjax serve`: a new drafter drafts for requests over HTTP."""

import json

import pytest

import specjax
from specjax.cli.main import main
from tests.conftest import save_tiny
from tests.serving.http.process import serving

RUN = """
output: {place}/run
method:
  {{name: dspark, target: {place}/target, layers: 1, block_size: 3, markov_rank: 4, anchors: 8}}
steps: 3
evaluate_every: 3
checkpoint_every: 3
data: {{source: {place}/texts.jsonl, window: 32, batch: 2, holdout: 0.1}}
"""
PROMPT, NEW, SAMPLED = "def f", 24, {"temperature": 0.9, "seed": 7}


@pytest.mark.thorough  # it trains and starts a server, which faster tests test separately
def test_a_dspark_is_trained_by_one_command_and_served_by_another(tmp_path) -> None:
    save_tiny(tmp_path / "target", max_positions=128)
    texts = (json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n"}) for i in range(60))
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    (tmp_path / "run.yaml").write_text(RUN.format(place=tmp_path))
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    target, drafter = str(tmp_path / "target"), str(tmp_path / "run" / "best")

    plain = specjax.load(target)
    greedy = plain(PROMPT, max_new_tokens=NEW).text
    sampled = plain(PROMPT, max_new_tokens=NEW, rule="coupled", **SAMPLED).text
    pair = ("--target", target, "--drafter", drafter, "--served-model-name", "tiny")
    chains = ("--drafts", "chain:3,0.4")  # the confidence head may end them
    with serving(tmp_path / "log", *pair, *chains, "--rows", "2", "--capacity", "64") as server:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW}
        answer = server.post("/v1/completions", body | {"temperature": 0})
        assert answer["choices"][0]["text"] == greedy
        assert server.post("/v1/completions", body | SAMPLED)["choices"][0]["text"] == sampled
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
