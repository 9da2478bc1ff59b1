"""Check ``specjax plan`` as a user meets it: numbers, refusals, and the picture."""

import inspect
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from specjax.assets import embedded
from specjax.chips import CHIPS
from specjax.cli.main import find_command, main
from specjax.cli.plan.options import compute_on_the_cpu
from specjax.drafters import DFlash2, TrainedDrafter
from specjax.drafters.registry import METHODS, load_drafter
from specjax.lowering.abstract import abstract_model, stored_drafter
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.published import PUBLISHED
from specjax.models.transformer import Target
from specjax.planning import roofline, theory
from specjax.sharding import make_mesh
from tests.conftest import blocks, tiny_config, tiny_target

MODELS = ("roofline", "--target", "llama-3.1-8b", "--drafter", "llama-3.2-1b")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def table(out: str) -> list[list[str]]:
    """Return the cells of the body of the table."""
    return [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in out.splitlines()
        if line.startswith("│")
    ]


@pytest.mark.parametrize(("chosen", "expected"), [(None, "cpu"), ("tpu", "tpu")])
def test_compiling_computes_on_the_cpu_unless_a_platform_was_chosen(chosen, expected) -> None:
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", chosen)
        compute_on_the_cpu()
        assert jax.config.jax_platforms == expected
    finally:
        jax.config.update("jax_platforms", before)


def test_the_table_of_a_cost(capsys) -> None:
    code, out, _ = run(capsys, "theory", "--alpha", "0.8", "--cost", "0.05")
    assert code == 0
    rows = table(out)
    assert [row[0] for row in rows] == [str(gamma) for gamma in range(1, 17)]
    # 1.8 / 1.05, 2.05 / 1.8, 1 / 1.8
    assert rows[0] == ["1", "1.80", "1.71x", "1.14x", "0.56x", ""]
    # 3.3616 / 1.2, 5.2 / 3.3616, 1 / 3.3616
    assert rows[3][1:5] == ["3.36", "2.80x", "1.55x", "0.30x"]
    best = theory.best_gamma(0.8, 0.05)
    assert [row[0] for row in rows if row[5] == "best"] == [str(best.gamma)] == ["8"]
    assert "Best: chains of 8, 3.09 times as fast as plain decoding." in out


def test_operations_are_the_cost_unless_they_are_given(capsys) -> None:
    options = ("--alpha", "0.5", "--cost", "0.1", "--operations", "0.02", "--longest", "2")
    _, out, _ = run(capsys, "theory", *options)
    assert [row[3] for row in table(out)] == ["1.35x", "1.74x"]  # 2.02 / 1.5, 3.04 / 1.75


@pytest.mark.parametrize(("longest", "cut_short"), [("8", True), ("9", False)])
def test_it_says_when_the_best_chain_is_the_longest_looked_at(capsys, longest, cut_short) -> None:
    _, out, _ = run(capsys, "theory", "--alpha", "0.8", "--cost", "0.05", "--longest", longest)
    assert "Best: chains of 8" in out
    assert ("A chain of more than 8 may be better still: raise --longest." in out) == cut_short


def test_it_says_when_speculation_does_not_pay(capsys) -> None:
    code, out, _ = run(capsys, "theory", "--alpha", "0.2", "--cost", "0.3")
    assert code == 0
    assert (
        "Speculation does not pay: plain decoding is best, as alpha = 0.2 is not above c = 0.3."
        in out.splitlines()
    )
    assert "best" not in [row[5] for row in table(out)]


def test_the_table_of_two_models(capsys) -> None:
    code, out, _ = run(capsys, *MODELS, "--batch", "1", "256", "--context", "1024")
    assert code == 0
    pair = roofline.Pair(PUBLISHED["llama-3.1-8b"], CHIPS["h100"], PUBLISHED["llama-3.2-1b"])
    one_row, many_rows = table(out)
    assert one_row == ["1", "4.52", "0.75", "4.52", "4", "2.02x", "1", "18.7"]
    best = roofline.best_gamma(pair, 256, 1024, 0.8)
    verify = 1e3 * pair.verify_time(256, 1024, best.gamma)
    assert many_rows[3:7] == [
        f"{verify:.2f}",
        "2",
        f"{best.factor:.2f}x",
        f"{roofline.break_even_context(pair, 256, 0.8)}",
    ]
    assert many_rows[7] == f"{pair.memory(256, 1024) / 1e9:.1f}"
    assert "upper bounds" in out


def test_the_table_of_a_model_and_a_method(capsys) -> None:
    """Plan Gemma 4 E2B with its own assistant, which has a thirtieth of the weights."""
    models = ("roofline", "--target", "gemma-4-e2b", "--drafter", "gemma4-assistant")
    models += ("--chip", "tpu-v5e")
    code, out, _ = run(capsys, *models, "--batch", "1", "8", "--longest", "4")
    assert code == 0
    one_row, many_rows = table(out)
    assert one_row[:6] == ["1", "5.60", "0.03", "5.60", "4", "3.29x"]
    assert (many_rows[0], many_rows[4]) == ("8", "4")
    assert float(many_rows[2]) > float(one_row[2])


def test_no_chain_is_longer_than_the_block_of_its_drafter(capsys) -> None:
    models = ("roofline", "--target", "qwen3-8b", "--drafter", "dspark", "--alpha", "0.9")
    code, out, _ = run(capsys, *models, "--batch", "1")
    assert code == 0
    (row,) = table(out)
    assert row[4] == "7"
    assert "Drafts of this drafter have at most 7 tokens." in " ".join(out.split())
    assert "raise --longest" not in out


def test_what_a_row_of_a_hybrid_takes_is_said(capsys) -> None:
    code, out, _ = run(
        capsys, "roofline", "--target", "qwen3.5-9b", "--drafter", "qwen3.5-4b", "--batch", "1"
    )
    assert code == 0
    printed = " ".join(out.split())
    # 8 layers of 32 keep 4 heads of 256 numbers, twice. The others keep 32 tables of 128 by 128,
    # and the inputs of the convolution for 3 tokens.
    cached, states = 8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    assert (
        f"A row of the target takes {cached / 1e3:.1f} KB for each token in its cache,"
        f" {states / 1e6:.1f} MB" in printed
    )
    assert "A row of the drafter takes" in printed
    _, out, _ = run(capsys, *MODELS, "--batch", "1")
    assert "A row of" not in out


@pytest.mark.parametrize("draft", ["hybrid", "plain"])
def test_a_hybrid_and_a_draft_model_of_the_same_vocabulary(draft, capsys, tmp_path) -> None:
    changes = blocks("M*") if draft == "hybrid" else {}
    models = tiny_config(**blocks("M*M-M-")), tiny_config(**changes)
    for name, model in zip(("target", "draft"), models, strict=True):
        (tmp_path / name).mkdir()
        content = json.dumps(config_json.format_config(model, "bfloat16"))
        (tmp_path / name / "config.json").write_text(content)
    options = ("--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "draft"))
    options += ("--batch", "100000", "--context", "256", "--longest", "4")
    code, out, _ = run(capsys, "roofline", *options)
    assert code == 0
    pair = roofline.Pair(models[0], CHIPS["h100"], models[1])
    times = pair.target_time(100_000, 256), pair.draft_time(100_000, 256)
    (row,) = table(out)
    assert row[1:3] == [f"{1e3 * time:.2f}" for time in times] and "0.00" not in row
    best = roofline.best_gamma(pair, 100_000, 256, 0.8, longest=4)
    assert row[5] == f"{best.factor:.2f}x"
    assert row[7].split()[0] == f"{pair.memory(100_000, 256) / 1e9:,.1f}"
    assert ("A row of the drafter takes" in out) == (draft != "plain")


def test_a_draft_cache_of_a_hybrid_is_refused(capsys) -> None:
    options = ("--drafter", "self", "--draft-cache", "512")
    code, _, error = run(capsys, "roofline", "--target", "qwen3.5-9b", *options)
    assert code == 2 and "draft_cache=(512,): layers of this drafter (qwen3_5" in error
    options = ("--drafter", "qwen3.5-4b", "--draft-cache", "512")
    code, _, error = run(capsys, "roofline", "--target", "qwen3.5-9b", *options)
    assert code == 2 and "draft_cache=(512,)" in error


def test_a_draft_cache_and_rows_that_do_not_pay_or_fit(capsys) -> None:
    options = ("--drafter", "self", "--draft-cache", "512", "--chip", "a100", "--context", "2000")
    code, out, _ = run(
        capsys, "roofline", "--target", "llama-3.1-8b", *options, "--batch", "1", "16", "64", "256"
    )
    assert code == 0
    assert [row[4] for row in table(out)] == ["plain", "plain", "1", "1"]
    assert [row[3] for row in table(out)][:2] == ["-", "-"]
    assert (
        "Speculation does not pay at 1, 16 rows: plain decoding is best there." in out.splitlines()
    )
    assert [row[7] for row in table(out)] == ["16.4", "21.3", "37.1", "100.3 > 80"]
    _, out, _ = run(
        capsys, "roofline", "--target", "llama-3.1-8b", *options, "--batch", "1", "--alpha", "0.1"
    )
    assert table(out)[0][6] == "never"


@pytest.mark.full
def test_models_are_read_from_directories_without_their_weights(capsys, tmp_path) -> None:
    for name, layers in (("target", 6), ("draft", 1)):
        (tmp_path / name).mkdir()
        content = config_json.format_config(
            tiny_config(num_layers=layers, max_positions=64), "float32"
        )
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    models = ("roofline", "--target", str(tmp_path / "target"))
    models += ("--drafter", str(tmp_path / "draft"), "--batch", "1")
    code, out, _ = run(capsys, *models, "--context", "32", "--plot", str(tmp_path / "a.svg"))
    assert code == 0
    assert len(table(out)) == 1
    code, _, err = run(capsys, *models, "--context", "65")
    assert (code, "context=65: the models support 64 tokens" in err) == (2, True)


@pytest.mark.parametrize("name", ["embedded:eagle3", "eagle3:embedded:eagle3", "embedded:mtp"])
def test_a_trained_drafter_costs_what_its_own_shape_costs(name, capsys) -> None:
    """Compare the parameters with those of the loaded drafter, and the times with the table."""
    target = Target.from_pretrained("embedded", dtype=jnp.bfloat16)
    loaded = load_drafter(name, None, target.config, jnp.bfloat16)
    assert isinstance(loaded, TrainedDrafter)
    abstract = roofline.Trained(
        stored_drafter(name, abstract_model(target.config, make_mesh(1, 1))), target
    )
    of_loaded = roofline.Trained(loaded, target)
    assert (
        abstract.parameters
        == of_loaded.parameters
        == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    )
    sizes = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(drafter.params))
        for drafter in (abstract.drafter, loaded)
    ]
    assert sizes[0] == sizes[1]
    chip = replace(CHIPS["h100"], bandwidth=1e6)  # so slow that all times have digits
    assert abstract.level_time(chip, 2, 64) == of_loaded.level_time(chip, 2, 64) > 0
    assert abstract.step_time(chip, 2, 64, 4) == of_loaded.step_time(chip, 2, 64, 4)
    models = ("roofline", "--target", "embedded", "--drafter", name)
    code, out, _ = run(capsys, *models, "--batch", "4096", "--context", "256")
    assert code == 0
    pair = roofline.Pair(target.config, CHIPS["h100"], of_loaded)
    best = roofline.best_gamma(pair, 4096, 256, 0.8)
    (row,) = table(out)
    assert row[2] == f"{1e3 * pair.draft_time(4096, 256):.2f}" != "0.00"
    assert row[4:6] == [str(best.gamma), f"{best.factor:.2f}x"]


def test_a_drafter_of_blocks_is_read_by_its_tensors_shapes_alone(capsys, tmp_path) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    DFlash2.init(
        target,
        jax.random.key(0),
        block_size=4,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=4,
    ).save_pretrained(tmp_path / "drafter")
    models = ("roofline", "--target", str(tmp_path / "target"), "--batch", "1", "--context", "32")
    code, whole, _ = run(capsys, *models, "--drafter", f"dflash2:{tmp_path / 'drafter'}")
    assert code == 0
    assert "T_D: drafting the best chain at once" in " ".join(whole.split())
    assert "have at most 3 tokens." in whole
    code, out, _ = run(capsys, *models, "--drafter", str(tmp_path / "drafter"))
    assert (code, table(out)) == (0, table(whole))


SMALL = {  # arguments of ``init`` if the usual sizes do not fit so small a target
    "dflash2": {"block_size": 4, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4},
    "medusa": {"heads": 2},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.trained is not None]
)
def test_every_trained_drafter_has_the_shapes_that_it_is_loaded_with(name, tmp_path) -> None:
    target, kind = tiny_target(), METHODS[name].trained
    assert kind is not None
    kind.init(target, jax.random.key(0), **SMALL.get(name, {})).save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    stored = stored_drafter(str(tmp_path), abstract_model(target.config, make_mesh(1, 1)))
    assert type(stored) is kind
    assert (stored.config, stored.draft) == (loaded.config, loaded.draft)
    described = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drafter.params)
        for drafter in (stored, loaded)
    ]
    assert described[0] == described[1]


def test_a_draft_model_is_named_in_every_way(capsys) -> None:
    models = ("roofline", "--target", "embedded", "--batch", "4096", "--context", "256")
    tables = []
    for name in (
        "embedded:draft",
        "draft-model:embedded:draft",
        "draft-model-intersect:embedded:draft",
    ):
        code, out, _ = run(capsys, *models, "--drafter", name)
        assert code == 0
        tables.append(table(out))
    assert tables[0] == tables[1] == tables[2]
    pair = roofline.Pair(
        config_json.read_config(CheckpointFiles(embedded("target"))),
        CHIPS["h100"],
        config_json.read_config(CheckpointFiles(embedded("draft"))),
    )
    assert tables[0][0][2] == f"{1e3 * pair.draft_time(4096, 256):.2f}" != "0.00"


def test_of_several_draft_caches_the_best_is_chosen_for_each_number_of_rows(capsys) -> None:
    """Compare each line with the tables of one size alone, none of which gains more.

    Each size has its own acceptance rate.
    """
    target = ("roofline", "--target", "llama-3.1-8b", "--drafter", "self")
    target += ("--context", "8000", "--batch", "1", "16", "32")
    alphas = {"64": "0.55", "256": "0.75", "1024": "0.85", "4096": "0.9"}
    code, out, _ = run(capsys, *target, "--draft-cache", *alphas, "--alpha", *alphas.values())
    assert code == 0
    together = table(out)
    assert [row[8] for row in together] == ["-", "1,024", "1,024"]
    alone = {
        size: table(run(capsys, *target, "--draft-cache", size, "--alpha", alpha)[1])
        for size, alpha in alphas.items()
    }
    assert [row[1:6] for row in together[1:]] == [row[1:6] for row in alone["1024"][1:]]
    for i, row in enumerate(together):
        assert row[5] == max(lines[i][5] for lines in alone.values())
        contexts = [
            int(lines[i][6].replace(",", "")) for lines in alone.values() if lines[i][6] != "never"
        ]
        assert row[6] == f"{min(contexts):,}"


FAULTS = [
    (["theory"], "cost: give --cost C, or compute it from two models with specjax plan roofline"),
    (["roofline"], "target='': name the model"),
    (["theory", "--cost", "0.1", "--alpha", "1.5"], "alpha=1.5"),
    (["theory", "--cost", "0.1", "--alpha", "nan"], "alpha=nan"),
    ([*MODELS, "--alpha", "-0.5"], "alpha=-0.5"),
    (["theory", "--cost", "0"], "cost=0:"),
    (["theory", "--cost", "-0.1"], "cost=-0.1:"),
    (["theory", "--cost", "0.1", "--operations", "0"], "operations=0:"),
    (["theory", "--cost", "0.1", "--longest", "0"], "longest=0"),
    (
        [*MODELS, "--chip", "h900"],
        "chip='h900': this chip is unknown; give one of h100, a100, tpu-v4",
    ),
    ([*MODELS, "--batch", "0"], "batch=0"),
    ([*MODELS, "--batch"], "batch=()"),
    ([*MODELS, "--context", "0"], "context=0"),
    ([*MODELS, "--context", "200000"], "context=200000: the models support 131072 tokens"),
    ([*MODELS, "--draft-cache", "0"], "draft_cache=0"),
    (
        [*MODELS, "--draft-cache", "64", "256"],
        "alpha=(0.8,): give one acceptance rate, or one for each size",
    ),
    ([*MODELS, "--alpha", "0.7", "0.8"], "alpha=(0.7, 0.8): give one acceptance rate"),
    (
        [*MODELS, "--draft-cache", "64", "64", "--alpha", "0.7", "0.8"],
        "draft_cache=(64, 64): give each size once",
    ),
    (["roofline", "--target", "llama-3.1-8b"], "drafter='': give a draft model"),
    (
        ["roofline", "--target", "llama-3.1-8b", "--drafter", "self"],
        "drafter='self': a target that drafts with its whole cache",
    ),
    (
        ["roofline", "--target", "llama-3.1-8b", "--drafter", "eagle3", "--draft-cache", "64"],
        "draft_cache=(64,): eagle3 has no draft cache",
    ),
    (
        ["roofline", "--target", "embedded", "--drafter", "early-exit:4"],
        "drafter='early-exit:4': must be a draft model",
    ),
    (
        ["roofline", "--target", "embedded", "--drafter", "snapkv"],
        "drafter='snapkv': must be a draft model, or a drafter",
    ),
    (
        ["roofline", "--target", "llama-3.1-8b", "--drafter", "embedded:eagle3"],
        "was made for a target with a vocabulary of",
    ),
    (
        ["roofline", "--target", "embedded", "--drafter", "embedded:eagle3", "--draft-cache", "64"],
        "has no draft cache",
    ),
    (
        ["roofline", "--target", "embedded", "--drafter", "eagle9:somewhere"],
        "no method of that name",
    ),
    (
        ["roofline", "--target", "llama-3.1-8b", "--drafter", "qwen3-0.6b"],
        "drafter has a vocabulary of 151936",
    ),
    (
        ["roofline", "--target", "llama-9", "--drafter", "llama-3.2-1b"],
        "target: 'llama-9' is not a published model known here; known are",
    ),
    (
        ["roofline", "--target", "llama-3.1-8b", "--drafter", "tiny"],
        "drafter: 'tiny' is not a published model",
    ),
    (
        ["roofline", "--target", "./nothing", "--drafter", "llama-3.2-1b"],
        "'./nothing' is not a directory",
    ),
    (
        ["theory", "--cost", "0.1", "--plot", "out.txt"],
        "plot='out.txt': the name must end in .png, .pdf, .svg",
    ),
    (
        ["theory", "--cost", "0.1", "--plot", "no/such/out.png"],
        "plot='no/such/out.png': there is no directory 'no/such'",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), FAULTS)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


PICTURES = {
    "theory": ("theory", "--cost", "0.05"),
    "roofline": (*MODELS, "--batch", "1", "64", "--longest", "6"),
}


@pytest.mark.full
@pytest.mark.parametrize("arguments", PICTURES.values(), ids=PICTURES)
def test_the_picture_is_written_and_shows_something(capsys, tmp_path, arguments) -> None:
    path = tmp_path / "plan.png"
    code, out, _ = run(capsys, *arguments, "--plot", str(path))
    assert code == 0
    assert str(path) in out
    assert list(tmp_path.iterdir()) == [path]  # no scratch file stays
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 500
    assert 0.01 < (pixels[..., :3] < 0.9).any(axis=-1).mean() < 0.5  # ink on paper


def test_a_picture_that_fails_leaves_the_old_one(capsys, tmp_path, monkeypatch) -> None:
    path = tmp_path / "plan.png"
    path.write_bytes(b"the old one")

    def fails_halfway(self: Figure, file: Path, **_) -> None:
        Path(file).write_bytes(b"half a pict")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails_halfway)
    code, _, err = run(capsys, "theory", "--cost", "0.05", "--plot", str(path))
    assert code == 2
    assert "cannot be written (disk full)" in err
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"the old one"]


COMMANDS = ("theory", "roofline", "measure", "contexts", "compile", "compile-training")


@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("--help",), 0), (("-h",), 0)])
def test_without_a_command_it_says_which_there_are(capsys, arguments, status) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (status, "")
    assert out.startswith("usage: specjax plan COMMAND ")
    assert [line.split()[0] for line in out.splitlines() if re.match(r"  \S", line)] == list(
        COMMANDS
    )


@pytest.mark.parametrize("arguments", [["dance"], ["--cost", "0.1"], ["train"]])
def test_a_word_that_is_no_command_of_plan_is_named(capsys, arguments) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert (
        err
        == f"specjax: error: {arguments[0]!r} is not a command; the commands of specjax plan are"
        f" {', '.join(COMMANDS)}\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command_is_explained(capsys, command) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", command, "--help"])
    assert ended.value.code == 0
    out = " ".join(re.sub(r"[│|]", " ", capsys.readouterr().out).split())
    assert f"usage: specjax plan {command} " in out
    config = find_command(["plan", command])[1].config
    documented = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in config.__mro__)
    explanations = dict(re.findall(r"^ {4}(\w+): (.+)", documented, re.MULTILINE))
    for field in fields(config):
        assert f"--{field.name.replace('_', '-')}" in out
        assert " ".join(explanations[field.name].split()[:3]) in out, field.name


@pytest.mark.parametrize(
    "arguments",
    [
        ("theory", "--target", "llama-3.1-8b"),
        ("theory", "--batch", "1"),
        ("roofline", "--cost", "0.1"),
        ("roofline", "--operations", "0.1"),
        ("roofline", "--prompts", "x"),
        ("measure", "--alpha", "0.5"),
        ("measure", "--chip", "a100"),
        ("measure", "--budgets", "8"),
        ("contexts", "--context", "8"),
        ("compile", "--chip", "a100"),
        ("compile", "--train", "x.yaml"),
        ("compile-training", "--drafter", "eagle3"),
        ("compile-training", "--batch", "8"),
    ],
)
def test_an_option_that_a_command_does_not_read_is_none_of_its(capsys, arguments) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_configuration_file_and_an_option_that_overrides_it(capsys, tmp_path) -> None:
    (tmp_path / "plan.yaml").write_text("cost: 0.05\nalpha: 0.5\nlongest: 2\n")
    _, out, _ = run(capsys, "theory", "--config", str(tmp_path / "plan.yaml"), "--alpha", "0.8")
    assert [row[1] for row in table(out)] == ["1.80", "2.44"]
    code, _, err = run(capsys, "theory", "--config", str(tmp_path / "plan.yaml"), "--cost", "0")
    assert (code, "cost=0:" in err) == (2, True)
