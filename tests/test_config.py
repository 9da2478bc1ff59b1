"""Reading configuration files, shown on the largest of them: `TrainConfig`."""

from dataclasses import replace
from pathlib import Path

import pytest

from specjax import config
from specjax.cli.main import parse_options
from specjax.config import ConfigError
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.methods import Distill, Lm
from specjax.training.objectives.whole_model import ModelSizes


def write(tmp_path, text: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("method", [Lm(), Distill(target="here")])
def test_what_is_dumped_is_read_back(tmp_path, method) -> None:
    method = replace(method, model=ModelSizes(num_layers=3))
    run = TrainConfig(method=method, steps=7, mesh=(2, 4), optimizer=OptimizerConfig(learning_rate=1e-4, method="muon"))
    assert config.load_yaml(TrainConfig, write(tmp_path, config.dump_yaml(run))) == run


def test_numbers_are_read_as_people_write_them(tmp_path) -> None:
    run = config.load_yaml(TrainConfig, write(tmp_path, "optimizer:\n  learning_rate: 3e-4\n  clip: 1\n"))
    assert run.optimizer.learning_rate == 3e-4
    assert run.optimizer.clip == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "unknown key stepz; known here: output"),
        ("optimizer:\n  lr: 1", r"unknown key optimizer\.lr; known here: method, learning_rate"),
        ("steps: many", "steps"),
        ("optimizer:\n  clip: much", r'"optimizer\.clip"'),
        ("optimizer:\n  method: sgd", r'"optimizer\.method"'),
        ("method:\n  name: gan", r"method\.name='gan': must be one of lm, distill"),
        ("method: lm", r"method\.name=None: must be one of lm, distill"),
        ("method:\n  target: here", r"method\.name=None: must be one of lm, distill"),
        ("method:\n  name: [lm]", r"method\.name=\['lm'\]: must be one of lm, distill"),
        ("method:\n  name: lm\n  target: here", r"unknown key method\.target; known here: name, model"),
        ("method:\n  name: distill\n  model:\n    layers: 1", r"unknown key method\.model\.layers; known here: hidden_size"),
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
        ({"data": DataConfig(batch=3), "mesh": (2, 1)}, r"data\.batch=3: must be a multiple of the 2 devices"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes).check()


def test_options_override_the_method_that_the_file_names() -> None:
    file = Path(__file__).parents[1] / "configs" / "demo_draft.yaml"
    options = ["--config", str(file), "--method.target", "there", "--method.model.num-layers", "3", "--mesh", "2", "1"]
    run = parse_options(TrainConfig, options, prog="x")
    sizes = replace(config.load_yaml(TrainConfig, file).method.model, num_layers=3)
    assert run.method == Distill(target="there", model=sizes)
    assert (sizes.hidden_size, run.mesh, run.optimizer.method) == (128, (2, 1), "muon")


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file"):
        config.load_yaml(TrainConfig, tmp_path / "nothing.yaml")


def test_differences_name_the_fields() -> None:
    other = TrainConfig(seed=1, optimizer=OptimizerConfig(b2=0.9))
    assert config.differences(TrainConfig(), TrainConfig()) == []
    assert config.differences(TrainConfig(), other) == ["seed: 0 -> 1", "optimizer.b2: 0.95 -> 0.9"]
    left, right = TrainConfig(method=Distill(target="a")), TrainConfig(method=Distill(target="b"))
    assert config.differences(left, right) == ["method.target: 'a' -> 'b'"]
    assert config.differences(TrainConfig(), left) == ["method.name: 'lm' -> 'distill'"]


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_configuration_of_the_project_can_be_used(file) -> None:
    run = config.load_yaml(TrainConfig, file)
    run.check()
    assert run.output == f"runs/{file.stem}"
    template = run.data.chat_template
    assert not template or (Path(__file__).parents[1] / template).is_file()
    assert file.read_text().startswith("# ")  # what it trains, and what to expect
