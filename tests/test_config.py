"""Reading configuration files, shown on the largest of them: `TrainConfig`."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from specjax import config
from specjax.cli.main import main, parse_options
from specjax.config import ConfigError
from specjax.models import config_json
from specjax.models.published import parameter_count, published
from specjax.models.transformer import Target
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.dry_run import abstract_run
from specjax.training.methods import Distill, Lm
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.step import name_of


def write(tmp_path, text: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("method", [Lm(), Distill(target="here")])
def test_what_is_dumped_is_read_back(tmp_path, method) -> None:
    method = replace(method, model=ModelSizes(num_layers=3))
    run = TrainConfig(
        method=method,
        steps=7,
        mesh=(2, 4),
        optimizer=OptimizerConfig(learning_rate=1e-4, method="muon"),
    )
    assert config.load_yaml(TrainConfig, write(tmp_path, config.dump_yaml(run))) == run


def test_numbers_are_read_as_people_write_them(tmp_path) -> None:
    run = config.load_yaml(
        TrainConfig, write(tmp_path, "optimizer:\n  learning_rate: 3e-4\n  clip: 1\n")
    )
    assert run.optimizer.learning_rate == 3e-4
    assert run.optimizer.clip == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "unknown key stepz; the keys are output"),
        ("optimizer:\n  lr: 1", r"unknown key optimizer\.lr; the keys are method, learning_rate"),
        ("steps: many", "steps"),
        ("optimizer:\n  clip: much", r'"optimizer\.clip"'),
        ("optimizer:\n  method: sgd", r'"optimizer\.method"'),
        ("method:\n  name: gan", r"method\.name='gan': must be one of lm, distill"),
        ("method: lm", r"method\.name=None: must be one of lm, distill"),
        ("method:\n  target: here", r"method\.name=None: must be one of lm, distill"),
        ("method:\n  name: [lm]", r"method\.name=\['lm'\]: must be one of lm, distill"),
        (
            "method:\n  name: lm\n  target: here",
            r"unknown key method\.target; the keys are name, model",
        ),
        (
            "method:\n  name: distill\n  model:\n    layers: 1",
            r"unknown key method\.model\.layers; the keys are hidden_size",
        ),
        ("method:\n  name: distill\n  model:\n    num_layers: few", r'"method\.model\.num_layers"'),
        ("- 1", "key: value pairs"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load_yaml(TrainConfig, write(tmp_path, text))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": Distill()}, r"method\.target=''"),
        (
            {"method": Lm(model=ModelSizes(max_positions=64))},
            r"data\.window=512 is longer than method\.model\.max_positions=64",
        ),
        ({"steps": 0}, "steps=0"),
        ({"data": DataConfig(holdout=1.5)}, r"data\.holdout=1\.5"),
        ({"data": DataConfig(window=1)}, r"data\.window=1"),
        (
            {"data": DataConfig(batch=3), "mesh": (2, 1)},
            r"data\.batch=3: must be a multiple of the 2 devices",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes).check()


def test_options_override_the_method_that_the_file_names() -> None:
    file = Path(__file__).parents[1] / "configs" / "demo_draft.yaml"
    options = [
        *("--config", str(file), "--method.target", "there", "--method.model.num-layers", "3"),
        *("--mesh", "2", "1"),
    ]
    run = parse_options(TrainConfig, options, prog="x")
    sizes = replace(config.load_yaml(TrainConfig, file).method.model, num_layers=3)
    assert run.method == Distill(target="there", model=sizes)
    assert (sizes.hidden_size, run.mesh, run.optimizer.method) == (128, (2, 1), "muon")


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file"):
        config.load_yaml(TrainConfig, tmp_path / "nothing.yaml")


def test_differences_name_the_fields() -> None:
    changed = TrainConfig(seed=1, optimizer=OptimizerConfig(b2=0.9))
    assert config.differences(TrainConfig(), TrainConfig()) == []
    assert config.differences(TrainConfig(), changed) == [
        "seed: 0 -> 1",
        "optimizer.b2: 0.95 -> 0.9",
    ]
    from_a, from_b = (
        TrainConfig(method=Distill(target="a")),
        TrainConfig(method=Distill(target="b")),
    )
    assert config.differences(from_a, from_b) == ["method.target: 'a' -> 'b'"]
    assert config.differences(TrainConfig(), from_a) == ["method.name: 'lm' -> 'distill'"]


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")),
    ids=lambda file: file.stem,
)
def test_every_configuration_of_the_project_can_be_used(file) -> None:
    run = config.load_yaml(TrainConfig, file)
    run.check()
    assert run.output == f"runs/{file.stem}"
    template = run.data.chat_template
    assert not template or (Path(__file__).parents[1] / template).is_file()
    assert file.read_text().startswith("# ")  # what it trains, and what to expect


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "name", "sizes"),
    [
        ("eagle3_gemma4_e4b", "gemma-4-e4b", (2560, 10240, 2048)),
        ("eagle3_gpt_oss_20b", "gpt-oss-20b", (2880, 17280, 4096)),
        ("peagle_qwen3_8b", "qwen3-8b", (4096, 12288, 4096)),
    ],
)
def test_a_dry_run_of_a_model_that_is_not_here_has_its_shapes(file, name, sizes) -> None:
    run = config.load_yaml(TrainConfig, Path(__file__).parents[1] / "configs" / f"{file}.yaml")
    hidden, mlp, heads = sizes
    target = jax.eval_shape(
        lambda: Target.init(published(name), jax.random.key(0), run.compute_dtype)
    )
    student = abstract_run(run, target=target).state.student
    shapes = {
        name_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(student)
    }
    assert shapes["params.fc"] == (3 * hidden, hidden)
    assert shapes["params.layers.0.up"] == (hidden, mlp)
    assert shapes["params.layers.0.q"] == (2 * hidden, heads)
    assert shapes["params.lm_head"] == (hidden, 32_000)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "name"), [("eagle3_gemma4_e4b", "gemma-4-e4b"), ("eagle3_gpt_oss_20b", "gpt-oss-20b")]
)
def test_a_dry_run_needs_the_target_s_config_json_alone(file, name, tmp_path, capsys) -> None:
    file = str(Path(__file__).parents[1] / "configs" / f"{file}.yaml")
    (tmp_path / "config.json").write_text(
        json.dumps(config_json.format_config(published(name), "bfloat16"))
    )
    assert main(["train", "--config", file, "--method.target", str(tmp_path), "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{parameter_count(published(name)):,} parameters, in bfloat16" in out
    assert "50,000 steps of 8 x 2048 tokens, 819,200,000 in total. Nothing was trained." in out
