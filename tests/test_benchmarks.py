"""The decoding benchmark, small: what it reports adds up, and what it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

import specjax
from benchmarks import (
    acceptance,
    arrivals,
    block_drafting,
    boundedness,
    decode,
    drafters,
    few_rows,
    long_context,
    messages,
    objectives,
    overfit,
    peers,
    recycled_answers,
    suffix_index,
    synthetic,
    train,
    training_cost,
    verification,
)
from specjax.errors import InputError
from specjax.evaluation.metrics import summarise
from specjax.models.published import PUBLISHED
from specjax.training.methods import AnyMethod
from tests.conftest import tiny_config, tiny_target

SMALL = {"inflate": (0, 0, 0), "new_tokens": 12, "repeats": 2, "context": (16,)}


@pytest.mark.thorough
def test_a_run_reports_every_method_and_their_parts(
    tiny_pair, tmp_path, monkeypatch, capsys
) -> None:
    def two(draft, exit_layers):
        return {
            "plain": None,
            "draft model": specjax.DraftModel(draft, draft=specjax.Chain(3, stop_below=0.4)),
        }

    monkeypatch.setattr(decode, "drafters_of", two)
    output = tmp_path / "results.json"
    target, draft = tiny_pair
    decode.run(
        decode.BenchmarkConfig(
            **SMALL, target=target, draft=draft, batch=(1, 2), output=str(output)
        )
    )
    results = json.loads(output.read_text())
    alone, together = results["cases"]
    assert set(alone["methods"]) == {"plain", "draft model", "transformers, greedy", *peers.ONE_ROW}
    assert set(together["methods"]) == {"plain", "draft model", "transformers, greedy"}
    for method in (alone["methods"] | together["methods"]).values():
        assert method["same_tokens"] == 1.0
        assert method["spread"][0] <= method["tokens_per_second"] <= method["spread"][1]
    drafted = alone["methods"]["draft model"]
    assert set(drafted["verify_ms"]) == {"1", "2", "4"}
    assert drafted["realised_share"] == pytest.approx(drafted["speedup"] / drafted["predicted"])
    assert alone["methods"]["plain"]["predicted"] == pytest.approx(1.0)
    assert results["machine"]["cores"] >= 1
    assert "realised" in capsys.readouterr().out


def test_models_whose_vocabularies_differ_are_refused_by_name(tmp_path, monkeypatch) -> None:
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match="drafter has a vocabulary of 11 tokens and target one of 3072"
    ):
        decode.run(decode.BenchmarkConfig(**SMALL, draft=str(tmp_path)))
    with pytest.raises(InputError, match="vocabulary of 32000 tokens and target one of 128256"):
        synthetic.models("llama-3.1-8b", "llama-2-7b", 0.8, "float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"batch": (1, 0)}, "batch=.* at least 1"),
        ({"context": (9_000_000,), "compare": False}, "context=9000000: the prompts hold"),
        ({"synthetic_acceptance": 1.5}, "synthetic_acceptance=1.5"),
        ({"dtype": "int3"}, "dtype='int3'"),
        (
            {"methods": ("drift",)},
            "methods='drift': no name begins so; there are plain, draft model, chain 4",
        ),
        ({"synthetic_acceptance": 0.5, "shape": "llama-9"}, "llama-3.1-8b"),
        ({"prompts": "nowhere.jsonl"}, "prompts='nowhere.jsonl'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(changes, words) -> None:
    with pytest.raises(InputError, match=words):
        decode.run(decode.BenchmarkConfig(**(SMALL | {"compare": False} | changes)))


@pytest.mark.full
@pytest.mark.parametrize(
    "acceptance", [*(pytest.param(value, marks=pytest.mark.thorough) for value in (0.0, 1.0)), 0.6]
)
def test_forced_acceptance_is_what_was_asked_for(monkeypatch, acceptance) -> None:
    monkeypatch.setitem(PUBLISHED, "tiny", tiny_config(vocab_size=500))
    target, drafters = synthetic.models("tiny", "", acceptance, "float32")
    prompts = np.random.default_rng(0).integers(0, 500, (8, 6))
    result = specjax.generate(target, drafters["draft model, chain 4"], prompts, max_new_tokens=200)
    by_position = summarise(result.stats).by_position
    steps = float(np.asarray(result.stats.steps).sum())
    # The second term is for what the limit cut off.
    deviation = 5 * np.sqrt(acceptance * (1 - acceptance) / steps) + 4 / steps
    assert abs(by_position[0] - acceptance) < deviation
    jax.clear_caches()


def test_methods_are_chosen_by_the_beginnings_of_their_names() -> None:
    drafters = dict.fromkeys(
        ("plain", "draft model, chain 4", "draft model, chain 8", "prompt lookup, 8")
    )
    assert [*decode.chosen(drafters, ("draft model, chain 4", "prompt"))] == [
        "plain",
        "draft model, chain 4",
        "prompt lookup, 8",
    ]
    assert decode.chosen(drafters, ()) == drafters


@pytest.mark.full
def test_loops_are_counted() -> None:
    """Count loops in the text of a random model, which repeats itself before long."""
    target = tiny_target(seed=2, vocab_size=4)
    prompts = np.random.default_rng(0).integers(0, 4, (12, 4))
    texts = specjax.generate(target, None, prompts, max_new_tokens=128).tokens.tolist()
    loops = [
        any(text[-64:] == (text[-64 : -64 + n] * 64)[:64] for n in range(1, 17)) for text in texts
    ]
    assert 1 > acceptance.share_of_loops(target, prompts, new_tokens=128) == np.mean(loops) > 0


@pytest.mark.thorough
def test_acceptance_is_counted_for_every_shape_and_rule(tiny_pair, monkeypatch, capsys) -> None:
    """Check that a model that drafts for itself has all accepted with coupled sampling.

    Chosen children are accepted less often.
    """
    tree = specjax.StaticTree(((0,), (1,), (0, 0), (1, 0)))
    monkeypatch.setattr(
        acceptance,
        "METHODS",
        ((specjax.Chain(2), "coupled"), (tree, "independent"), (tree, "coupled")),
    )
    settings = {
        "count": 4,
        "context": 8,
        "new_tokens": 24,
        "temperature": (0.0, 1.5),
        "top_p": (1.0, 0.9),
    }
    rows = acceptance.run(
        acceptance.AcceptanceConfig(target=tiny_pair[0], draft=tiny_pair[0], **settings)
    )
    assert [(row["rule"], row["nodes"], row["T=0"]) for row in rows] == [
        ("coupled", 3, 3.0),
        ("matching", 5, 3.0),
        ("coupled", 5, 3.0),
    ]
    matching, coupled = (row["T=1.5, top-p 0.9"] for row in rows[1:])
    assert matching < coupled == 3.0
    with pytest.raises(InputError, match="one for each temperature, of which there are 3"):
        acceptance.main(acceptance.AcceptanceConfig(top_p=(1.0,)))


@pytest.mark.thorough
def test_both_libraries_are_measured(tiny_pair, tmp_path, capsys) -> None:
    target, draft = tiny_pair
    output = tmp_path / "results.json"
    sizes = {
        "inflate": (0, 0, 0),
        "context": 16,
        "new_tokens": 12,
        "rows": (5,),
        "matrices": (2, 32, 48),
        "repeats": 1,
    }
    few_rows.main(
        few_rows.FewRowsConfig(target, draft, methods=("plain",), output=str(output), **sizes)
    )
    results = json.loads(output.read_text())
    assert [*results["products"]] == ["5"] and [*results["decoding"]] == ["plain"]
    for rates in (*results["products"].values(), *results["decoding"].values()):
        assert {*few_rows.LIBRARIES} <= {*rates}
    assert all(row["same_tokens"] for row in results["decoding"].values())
    assert "specjax takes " in capsys.readouterr().out
    with pytest.raises(InputError, match="repeats=0"):
        few_rows.run(few_rows.FewRowsConfig(repeats=0))


@pytest.mark.full
def test_every_rule_is_timed(capsys) -> None:
    verification.main(
        verification.VerificationConfig(vocab=(64,), batch=(1,), top_p=(1.0,), repeats=1)
    )
    out = capsys.readouterr().out
    assert [line.split("│")[1].strip() for line in out.splitlines() if "│" in line] == [
        rule for rule, *_ in verification.CASES
    ]


@pytest.mark.full
def test_the_parts_of_a_draft_from_earlier_text_are_timed(capsys) -> None:
    config = suffix_index.SuffixIndexConfig(
        tokens=300, rows=2, own_tokens=40, vocab=50, repeats=2, sorts=1, inserted=10
    )
    suffix_index.main(config)
    out = capsys.readouterr().out
    assert "300 tokens, 2 rows" in out and "insertion of 10 tokens" in out
    assert all(f"whole draft, {name}" in out for name in suffix_index.SHAPES)
    with pytest.raises(InputError, match="tokens must be more than twice own_tokens"):
        suffix_index.main(dataclasses.replace(config, tokens=80))
    with pytest.raises(InputError, match="inserted=0: must be from 1"):
        suffix_index.main(dataclasses.replace(config, inserted=0))


@pytest.mark.full
def test_our_loss_is_that_of_speculators() -> None:
    """Compare EAGLE-3's training-time test on the same weights and numbers, and time both."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "heads": 4, "vocab_size": 40, "window": 24}
    measured = train.measure(train.TrainBenchmarkConfig(**sizes, steps=3, repeats=1))
    assert measured["losses"]["specjax"] == pytest.approx(
        measured["losses"]["speculators"], rel=1e-4
    )
    assert measured["losses"]["specjax"] > 1e-3
    assert all(len(seconds) == 1 for seconds in measured["seconds"].values())


@pytest.mark.thorough
def test_trained_drafters_are_set_beside_each_other(tiny_pair, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(drafters, "SHAPES", {"chain": specjax.Chain(2)})
    target, draft = tiny_pair
    settings = {
        "inflate": (24, 32, 3),
        "count": 2,
        "context": 8,
        "new_tokens": 8,
        "timed": 1,
        "temperature": (0.0,),
        "repeats": 1,
    }
    rows = drafters.run(
        drafters.DraftersConfig(
            target=target, runs=(f"itself={target}", f"small={draft}"), **settings
        )
    )
    itself, small = rows
    assert itself["acceptance_length"] > 2.5 > small["acceptance_length"] >= 1
    assert (itself["seeds"], len(itself["speeds"])) == (1, 1)
    with pytest.raises(InputError, match="runs='nothing': write NAME=GLOB"):
        drafters.run(drafters.DraftersConfig(target=target, runs=("nothing",)))


@pytest.mark.full
def test_drafters_go_on_alone(tiny_pair, tmp_path, capsys) -> None:
    """Check that the target itself, as a draft model, agrees with itself everywhere."""
    target, draft = tiny_pair
    output = tmp_path / "alone.json"
    runs = (f"target={target}", f"draft={draft}")
    small = {"count": 3, "context": 8, "written": 5, "alone": 4}
    boundedness.main(
        boundedness.BoundednessConfig(target=target, runs=runs, output=str(output), **small)
    )
    itself, smaller = json.loads(output.read_text())
    assert itself["agreement"] == 1.0
    assert itself["until_first_difference"] == 4.0
    assert smaller["agreement"] < 1.0
    assert "at 3" in capsys.readouterr().out
    with pytest.raises(InputError, match="must be at least 1"):
        boundedness.run(boundedness.BoundednessConfig(alone=0))


@pytest.mark.thorough  # eight gradients to compile
def test_the_cost_of_training_is_counted(tiny_pair) -> None:
    """Check that a block's length costs nothing, and that each step of the other drafters does."""
    rows = training_cost.run(
        training_cost.TrainingCostConfig(
            target=tiny_pair[0], lengths=(1, 3), batch=1, window=16, repeats=1
        )
    )
    operations = {row["method"]: row["gigaflops"] for row in rows}
    assert operations["MoA"][3] == pytest.approx(operations["MoA"][1], rel=1e-3)
    assert operations["EAGLE-3"][3] > 1.5 * operations["EAGLE-3"][1]
    with pytest.raises(InputError, match="from 1 to 14"):
        training_cost.run(training_cost.TrainingCostConfig(lengths=(15,), window=16))


def test_the_messages_of_a_round_are_listed(capsys) -> None:
    messages.main(messages.MessagesConfig(tli=(0, 3)))
    lines = {
        line.split("│")[1].strip(): line.split("│")[2:5]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in lines["moa, TLI 3"]] == ["0.36", "64.0", "16.0"]
    assert len(lines) == 3 + 3 * 2
    with pytest.raises(InputError, match="nodes=-1"):
        messages.run(messages.MessagesConfig(nodes=-1))


@pytest.mark.thorough
def test_long_contexts_are_measured_and_realised(tmp_path, tiny_pair, capsys) -> None:
    source, output, picture = tmp_path / "texts", tmp_path / "long.json", tmp_path / "long.png"
    source.mkdir()
    for i in range(2):
        (source / f"{i}.py").write_text(f"import os, sys, re, json  # {i}\n" * 20)
    small = {
        "contexts": (8, 24),
        "batches": (2,),
        "budgets": (6,),
        "longest": 1,
        "new_tokens": 4,
        "repeats": 1,
        "mlp": 128,
    }
    files = {"source": str(source), "output": str(output), "plot": str(picture)}
    long_context.main(long_context.LongContextConfig(target=tiny_pair[0], **small, **files))
    results = json.loads(output.read_text())
    assert results["settings"]["mlp"] == 128
    gains = [(row["predicted"]["context"], row["predicted"]["batch"]) for row in results["gains"]]
    assert gains == [(8, 2), (24, 2)]
    assert all(row["realised"] > 0 for row in results["gains"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "plain tokens/s" in capsys.readouterr().out
    inflated = long_context.load_target(
        long_context.LongContextConfig(target=tiny_pair[0], mlp=128)
    )
    assert inflated.config.intermediate_size == 128
    with pytest.raises(InputError, match="mlp=1: the target has"):
        long_context.load_target(long_context.LongContextConfig(target=tiny_pair[0], mlp=1))
    with pytest.raises(InputError, match="no file there has 5000 tokens"):
        long_context.run(
            long_context.LongContextConfig(
                target=tiny_pair[0], source=str(source), contexts=(5000,)
            )
        )
    with pytest.raises(InputError, match="scheme='none'"):
        long_context.run(long_context.LongContextConfig(target=tiny_pair[0], scheme="none"))


SMALL_ARRIVALS = {
    "inflate": (24, 32, 3),
    "rows": 2,
    "context": 6,
    "shortest": 2,
    "longest": 8,
    "requests": 5,
    "repeats": 1,
}
SMALL_ARRIVALS |= {
    "shares": (0.5, 2.0),
    "seconds": 0.3,
    "prefix": 130,
    "sharing": 3,
    "draft": "chain:2",
    "drafts": ("chain:2",),
}


def measure_arrivals(directory: Path, **options) -> dict:
    names = {"output": "found.json", "plot_rows": "rows.png", "plot_rates": "rates.png"}
    files = {option: str(directory / name) for option, name in names.items()}
    arrivals.main(arrivals.ArrivalsConfig(**SMALL_ARRIVALS, **options, **files))
    for name in ("rows.png", "rates.png"):
        assert (directory / name).read_bytes().startswith(b"\x89PNG")
    return json.loads((directory / "found.json").read_text())


@pytest.mark.thorough  # many engines to compile
def test_arrivals_are_measured(tiny_pair, tmp_path, capsys) -> None:
    results = measure_arrivals(tmp_path, target=tiny_pair[0], drafter="none")
    (row,) = results["batches"]
    assert row["same_tokens"] == 1.0  # static or continuous, the text is the same
    assert {len(stays) for stays in row["stays"].values()} == {5}
    per_minute = row["requests_per_minute"]
    assert row["gain"]["middle"] == pytest.approx(
        per_minute["continuous"]["middle"] / per_minute["static"]["middle"]
    )

    for row in results["rates"]["rates"]:
        run = {name: spread["middle"] for name, spread in row["engines"]["plain"].items()}
        assert 0 < run["first_token"] <= run["seconds_per_request"]
        assert run["tokens_per_second"] > 0

    shared, separate = (
        {name: run["middle"] for name, run in results["prefix"][way].items()}
        for way in ("shared", "separate")
    )
    whole = 3 * (130 + arrivals.OWN - 1)
    assert (separate["prompt_tokens_read"], separate["prompt_tokens_shared"]) == (whole, 0)
    reused = 2 * 128  # two of the three requests reuse 128 tokens
    assert shared["prompt_tokens_read"] == whole - reused
    assert shared["prompt_tokens_shared"] == reused
    assert (separate["pages_held"], shared["pages_held"]) == (3 * 3, 2 + 3)

    calls = {row["chunks"]: row["decode_calls"]["middle"] for row in results["first_token"]}
    assert list(calls) == [1, 2, 4]
    # The upper bound is tested with the engine: here the calls of a tiny model are over before this
    # thread has seen the token.
    assert all(calls.values())
    printed = capsys.readouterr().out
    assert "of the better" not in printed and "requests that begin alike" in printed


@pytest.mark.thorough  # three engines to compile
def test_arrivals_are_measured_with_drafts(tiny_pair, tmp_path, capsys) -> None:
    target, draft = tiny_pair
    results = measure_arrivals(tmp_path, target=target, drafter=draft, parts=("batches", "rates"))
    assert [(row["draft"], row["same_tokens"]) for row in results["batches"]] == [
        ("plain", 1.0),
        ("chain:2", 1.0),
    ]
    rates = results["rates"]["rates"]
    assert [row["compared_by"] for row in rates] == ["seconds_per_request", "requests_per_minute"]
    for row in rates:
        assert list(row["engines"]) == ["plain", "chain:2", "by load"]
        assert row["by_load_over_better"] > 0
    assert {line["draft"] for line in results["rates"]["choice"]} == {"none", "chain of 2"}
    assert "of the better" in capsys.readouterr().out


def test_arrivals_come_at_the_rate_that_was_asked_for() -> None:
    counts = [len(arrivals.arrivals_of(2.0, 50.0, seed)) for seed in range(200)]
    assert np.mean(counts) == pytest.approx(100, abs=4 * 10 / np.sqrt(200))
    assert np.var(counts) == pytest.approx(100, rel=0.5)  # Poisson
    times = arrivals.arrivals_of(2.0, 50.0, 0)
    assert np.all(np.diff(times) >= 0) and times[0] >= 0 and times[-1] <= 50


def test_what_requests_saw_is_counted_from_their_arrival() -> None:
    served = [
        arrivals.Served((1, 2), 1.0, 2.0, 4.0),
        arrivals.Served((1, 2, 3, 4, 5), 0.0, 3.0, 10.0),
    ]
    summary = arrivals.summary(served)
    assert summary["tokens_per_second"] == 0.7 and summary["requests_per_minute"] == 12
    assert summary["seconds_per_request"] == 6.5 and summary["first_token"] == 2.0
    assert summary["seconds_per_token"] == pytest.approx((1.5 + 2.0) / 2)
    assert arrivals.ideal_gain([4, 1, 3, 2], rows=2) == pytest.approx(2 * (4 + 3) / 10)


def test_by_load_is_set_beside_the_better_of_the_others() -> None:
    def runs(figure: str, plain: float, fixed: float, by_load: float) -> dict:
        return {
            "plain": [{figure: plain}],
            "chain:4": [{figure: fixed}],
            arrivals.BY_LOAD: [{figure: by_load}],
        }

    assert arrivals.over_better(
        runs("requests_per_minute", 10, 8, 9), "requests_per_minute"
    ) == pytest.approx(0.9)
    assert arrivals.over_better(
        runs("seconds_per_request", 4, 2, 2.5), "seconds_per_request"
    ) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 0}, "rows=0: must be at least 1"),
        ({"longest": 8}, "longest=8: must be at least shortest=16"),
        ({"shares": (0.5, 0.0)}, "must be above 0"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"plot_rates": "rates.txt"}, "plot_rates='rates.txt': the name must end in"),
        ({"plot_rates": "rates.png", "parts": ("batches",)}, "is a picture of part rates"),
    ],
)
def test_arrivals_that_cannot_be_measured_are_refused_by_name(changes, words) -> None:
    with pytest.raises(InputError, match=words):
        arrivals.run(arrivals.ArrivalsConfig(**changes))


@pytest.mark.thorough
def test_drafts_of_every_depth_are_timed(tiny_pair, tmp_path, capsys) -> None:
    output, same_size = tmp_path / "results.json", (16, 24, 2)
    config = block_drafting.BlockDraftingConfig(
        target=tiny_pair[0], inflate=same_size, layers=2, depths=(1, 3), context=8
    )
    block_drafting.main(dataclasses.replace(config, turns=1, repeats=2, output=str(output)))
    results = json.loads(output.read_text())
    assert [(row["drafter"], row["depth"]) for row in results] == [
        (n, d) for n in block_drafting.MADE for d in (1, 3)
    ]
    assert all(len(row["milliseconds"]) == 2 and min(row["milliseconds"]) > 0 for row in results)
    assert "3 / 1" in capsys.readouterr().out


@pytest.mark.full
def test_heads_learn_a_text_by_heart() -> None:
    """Medusa's heads reach the whole chain on the one text that they are trained on."""
    config = overfit.OverfitConfig(methods=("medusa",), texts=1, window=24, steps=60)
    result = overfit.run(config)["medusa"]
    assert result["before"] < 2
    assert result["share"] > 0.95


def test_every_registered_method_is_overfit() -> None:
    names = {method.name for method in get_args(AnyMethod)}
    assert set(overfit.all_methods("embedded")) == names
    for method in overfit.all_methods("embedded").values():
        method.check(window=48)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"methods": ("eagle9",)}, "methods='eagle9': give some of lm, "), ({"texts": 9}, "texts=9")],
)
def test_what_cannot_be_overfit_is_refused(changes, words) -> None:
    with pytest.raises(InputError, match=words):
        overfit.run(overfit.OverfitConfig(**changes))


def test_objectives_need_a_checkout_of_specforge(tmp_path) -> None:
    with pytest.raises(InputError, match=r"has no specforge/core/loss\.py; give a checkout"):
        objectives.import_specforge(str(tmp_path))


def test_results_that_differ_are_not_timed() -> None:
    result = 2.0, {"fc.weight": np.ones(3)}
    half = 1.0, {"fc.weight": np.full(3, 0.5)}
    differences = objectives.check_equal("theirs", result, half, factor=2.0)
    assert differences == {"loss": 0.0, "gradients": 0.0}
    with pytest.raises(InputError, match=r"theirs: the losses differ by 5\.0e-01"):
        objectives.check_equal("theirs", result, half, factor=1.0)
    with pytest.raises(InputError, match=r"the tensors differ: \{'fc.weight'\}"):
        objectives.check_equal("theirs", result, (2.0, {}), factor=1.0)


@pytest.mark.full
def test_the_texts_of_token_recycling_do_not_depend_on_its_tables() -> None:
    generator = specjax.load("embedded", generation_config=None)
    beginnings = recycled_answers.BEGINNINGS[:2] * 2  # each comes again
    empty, texts = recycled_answers.tokens_a_step(generator, 0.0, False, beginnings)
    filled, same_texts = recycled_answers.tokens_a_step(generator, 0.0, True, beginnings)
    assert texts == same_texts
    assert filled > empty > 1
