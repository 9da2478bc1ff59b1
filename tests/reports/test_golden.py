"""Write golden files, and read them as InferenceX does."""

import pytest
import yaml

from specjax.reports.golden import golden_yaml


def look_up(block, draft_length: int, mode: str):
    """Find a length as ``runners/inject_synthetic_acceptance.py`` of InferenceX does."""
    if isinstance(block, list):
        return next((item[draft_length] for item in block if draft_length in item), None)
    return block[mode].get(draft_length)


@pytest.mark.parametrize("thinking", ["on", "off", None])
def test_a_golden_file_is_read_as_inferencex_reads_it(thinking) -> None:
    lengths = {3: 2.4949, 1: 1.7951, 10: 2.0, 4: None}
    text = golden_yaml("deepseek-ai/DeepSeek-V4-Pro/", thinking, lengths, ["dataset: coding"])
    assert text.startswith("# dataset: coding\n")
    parsed = yaml.safe_load(text)
    assert list(parsed) == ["deepseek-v4-pro"]
    block = parsed["deepseek-v4-pro"]
    mode = f"thinking_{thinking}"
    assert [look_up(block, n, mode) for n in (1, 3, 10, 4, 2)] == [1.8, 2.49, 2.0, "N/A", None]
    assert text.index("10: 2.00") > text.index("3: 2.49") > text.index("1: 1.80")


def test_any_name_is_a_key() -> None:
    for name in ("runs/my model", "0-8b", "owner/a: b", "true"):
        expected = name.rpartition("/")[2]
        assert list(yaml.safe_load(golden_yaml(name, "on", {1: 1.5}, []))) == [expected]
