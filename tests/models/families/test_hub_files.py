"""Published config.json files have as many parameters as in transformers, or are refused."""

import pytest

from specjax.models.families import FAMILIES
from tests.conftest import SHARED
from tests.models.families import hub_files

CONFIGS = SHARED / "configs"
pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="needs ../shared/data")


def test_a_published_file_of_a_family_is_read_and_others_are_refused_in_a_line() -> None:
    beside = hub_files.quantizations(CONFIGS)
    for name, raw in hub_files.files(CONFIGS).items():
        count, summary = hub_files.outcome(raw, beside.get(name))
        assert "\n" not in summary
        if raw["model_type"] in FAMILIES:
            assert count is not None, (name, summary)
        else:
            assert summary.startswith(f"refused: model_type={raw['model_type']!r} is not supported")


@pytest.mark.full
def test_a_published_model_has_as_many_parameters_as_in_transformers() -> None:
    """Quantized files as well, whose models have the parameters of the model in floats."""
    counts = {}
    for name, raw in hub_files.files(CONFIGS).items():
        in_floats = {field: raw[field] for field in raw if field != "quantization_config"}
        if (count := hub_files.outcome(in_floats)[0]) is not None:
            counts[name] = (count, hub_files.count_by_transformers(in_floats))
    assert len(counts) == 46
    assert not {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
