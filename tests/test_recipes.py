"""The table of recipes: which cells it has, and the arithmetic of its hours."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import recipes
from specjax.chips import find_chip
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.models.published import parameter_count, published
from specjax.training.config import TrainConfig

V5P, H100S, _, V5E, H100 = recipes.OFFERS
SIX_LAYERS = recipes.RecipesConfig(layers=6, limit=1.0)


def test_every_recipe_names_its_target() -> None:
    for recipe, target, _ in recipes.cells():
        config = load_yaml(TrainConfig, f"configs/{recipe}.yaml")
        plain = config.method.target.lower().partition("/")[2]
        assert plain.startswith(target)
        assert config.method.name == recipe.partition("_")[0]


def test_large_targets_are_split() -> None:
    assert recipes.mesh_of("qwen3-8b", H100S) == (8, 1)
    assert recipes.mesh_of("qwen3-32b", H100S) == (2, 4)
    assert recipes.mesh_of("qwen3-8b", V5E) == (1, 8)
    assert recipes.mesh_of("qwen3-8b", V5P) == (4, 1)
    assert recipes.mesh_of("qwen3-32b", H100) == (1, 1)


@pytest.mark.parametrize("target", ["qwen3-8b", "gpt-oss-20b", "gemma-4-e4b"])
def test_a_cut_target_is_its_first_layers(target) -> None:
    whole = published(target)
    part = recipes.cut(whole, 6)
    assert part.num_layers == 6
    assert [part.window_of(layer) for layer in range(6)] == [
        whole.window_of(layer) for layer in range(6)
    ]
    assert recipes.cut(whole, 0) is whole
    assert parameter_count(part) < parameter_count(whole) / 2


@pytest.mark.full
def test_hours_are_operations_at_a_share_of_the_peak() -> None:
    """Count the operations of EAGLE-3 by hand, without attention, which adds a few percent."""
    config = load_yaml(TrainConfig, "configs/eagle3_qwen3_8b.yaml")
    target = published("qwen3-8b")
    embedding = 151936 * 4096
    read = 2 * (parameter_count(target) - embedding)
    layer = 2 * 8192 * 1024 + 8192 * 4096 + 4096 * 4096 + 3 * 4096 * 12288
    drafter = 7 * 6 * (layer + 4096 * 32000) + 4 * 3 * 4096 * 4096
    counted = recipes.operations(config, target)
    assert 1.0 < counted / (read + drafter) < 1.06
    on_a_chip = recipes.hours(config, target, find_chip("h100"), 1, 0.4)
    assert on_a_chip == pytest.approx(50_000 * 8 * 2048 * counted / (989.4e12 * 0.4) / 3600)
    assert recipes.hours(config, target, find_chip("h100"), 8, 0.2) == pytest.approx(on_a_chip / 4)


@pytest.mark.full
def test_a_cell_is_compiled_in_another_process_and_its_memory_is_completed(monkeypatch) -> None:
    memory = {"arguments": 10, "temporaries": 5, "results": 1}
    program = {"memory": memory, "seconds": 1.2, "a_step": {"cycles": 7}}
    report = {"chip": {"memory": 1}, "step": program}
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout=json.dumps(report), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    record = recipes.compile_cell("dflash_qwen3_32b", "qwen3-32b", H100S, SIX_LAYERS)
    assert commands[0][commands[0].index("--mesh") + 1 :][:2] == ["2", "4"]
    # 58 of the 64 layers are absent, split over four chips.
    assert record["absent"] == pytest.approx(2 * 58 / 64 * 31.2e9 / 4, rel=0.02)
    assert recipes.bytes_on_a_chip(record) == record["absent"] + 16
    monkeypatch.setattr(recipes, "hours", lambda *_: 12.3)
    row = recipes.table({"dflash_qwen3_32b on H100 x 8": record}, 0.4).splitlines()
    (line,) = [line for line in row if "`dflash_qwen3_32b` | H100 x 8" in line]
    assert "| fits | 12 |" in line


def test_a_refusal_is_recorded(monkeypatch) -> None:
    ended = SimpleNamespace(
        returncode=2, stdout="", stderr="a warning\nspecjax: error: too large\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    record = recipes.compile_cell("eagle3_qwen3_8b", "qwen3-8b", H100, SIX_LAYERS)
    assert record == {"refused": "specjax: error: too large"}


def test_cycles_of_a_whole_target_follow_from_two_depths() -> None:
    config = load_yaml(TrainConfig, "configs/dflash_qwen3_32b.yaml")
    chip = find_chip("tpu-v5p")
    # A step has 100 million cycles beside the layers, and each of the 64 layers has 50 million.
    record = {"of_layers": 64, "step_cycles": {"12": 700_000_000, "6": 400_000_000}}
    expected = 50_000 * (100e6 + 64 * 50e6) / chip.clock / 3600
    assert recipes.hours_by_cycles(record, config, chip) == pytest.approx(expected)
    assert recipes.hours_by_cycles({"of_layers": 64}, config, chip) is None
    assert recipes.hours_by_cycles(record, config, find_chip("h100")) is None


def test_cycles_are_counted_with_the_default_effort(monkeypatch) -> None:
    configs = []

    def compile_cell(recipe, target, chips, config):
        configs.append(config)
        return {"programs": {"step": {"cycles": 10 * config.layers}}}

    monkeypatch.setattr(recipes, "compile_cell", compile_cell)
    counts = recipes.count_cycles("eagle3_qwen3_8b", "qwen3-8b", V5P, SIX_LAYERS)
    assert counts == {"step_cycles": {"6": 60, "12": 120}}
    assert [(config.layers, config.effort) for config in configs] == [(6, 0.0), (12, 0.0)]


NAMED_CHIPS = {"eight H100": "H100 x 8", "v5p-8": "v5p-8", "v5p-32": "v5p-32"}
"""The chips that a configuration of `configs` may name, and their names in the table."""


@pytest.mark.parametrize("method", recipes.METHODS)
def test_a_recipe_fits_the_chips_that_its_file_names(method) -> None:
    """Read the records of the compiled cells of Qwen3-32B, whose files name chips."""
    records = json.loads(Path("benchmarks/results/recipes.json").read_text())
    comments = Path(f"configs/{method}_qwen3_32b.yaml").read_text().replace("\n# ", " ")
    for text, name in NAMED_CHIPS.items():
        assert text in comments
        chip = next(offer.chip for offer in recipes.OFFERS if offer.name == name)
        record = records[f"{method}_qwen3_32b on {name}"]
        assert "refused" not in record
        assert recipes.bytes_on_a_chip(record) <= find_chip(chip).memory, name
    assert "the chips of a v5e-8 are too small" in comments
    needed = recipes.bytes_on_a_chip(records[f"{method}_qwen3_32b on v5e-8"])
    assert needed > find_chip("tpu-v5e").memory


@pytest.mark.full
def test_no_recorded_target_is_cut_to_fewer_layers_than_a_drafter_reads() -> None:
    records = json.loads(Path("benchmarks/results/recipes.json").read_text())
    assert len(records) == len(recipes.cells())
    assert {record["layers"] for record in records.values() if "refused" not in record} == {6}
    with pytest.raises(InputError, match="layers=2: the drafter of dflash_qwen3_32b reads more"):
        recipes.compile_cell("dflash_qwen3_32b", "qwen3-32b", V5P, replace(SIX_LAYERS, layers=2))


@pytest.mark.full
@pytest.mark.thorough_except("dflash_gemma4_e4b", "dflash_gpt_oss_20b")
@pytest.mark.parametrize("recipe", sorted({recipe for recipe, _, _ in recipes.cells()}))
def test_a_cut_target_has_the_drafter_of_the_whole_one(recipe) -> None:
    config = load_yaml(TrainConfig, f"configs/{recipe}.yaml")
    whole = published(next(target for name, target, _ in recipes.cells() if name == recipe))
    size = recipes.student_size(config, whole)
    for layers in (SIX_LAYERS.layers, *recipes.CYCLE_LAYERS):
        assert recipes.student_size(config, recipes.cut(whole, layers)) == size


def test_cycles_that_cannot_be_counted_are_not_tried_again(monkeypatch) -> None:
    monkeypatch.setattr(recipes, "compile_cell", lambda *_: {"refused": "too large"})
    record = recipes.count_cycles("eagle3_qwen3_8b", "qwen3-8b", V5P, SIX_LAYERS)
    assert record == {"cycles_refused": "too large"}
    counting = recipes.RecipesConfig(cycles=True)
    for stored, chips, is_missing in (
        ({}, V5P, True),
        (record, V5P, False),
        ({"step_cycles": {}}, V5P, False),
        ({}, H100, False),  # its compiler counts none
        ({"refused": "too large"}, V5P, False),
        (None, V5P, False),
    ):
        assert recipes.is_missing(stored, chips, counting) == is_missing
    assert recipes.is_missing(None, V5P, SIX_LAYERS)
    assert not recipes.is_missing({}, V5P, SIX_LAYERS)
