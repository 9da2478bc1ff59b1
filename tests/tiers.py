"""Put the cases of one test into two tiers.

A pytest plugin, loaded by ``conftest.py``. ``make test`` runs the tests without the markers
``full``, ``thorough`` and ``browser``, ``make test-full`` those with ``full`` and without
``thorough``, and ``make test-thorough`` all of them. A parametrized test often needs only a few of
its cases in the earlier tier. It names these by their ids, and all other cases are ``full``, or
``thorough``. A test with ``thorough_except`` must be ``full`` or have ``full_except``, so that no
case skips a tier. With both, the cases that neither of them names are ``thorough``:

    @pytest.mark.full_except("chain", "dynamic")
    @pytest.mark.parametrize("shape", SHAPES)
    def test_something(shape): ...
"""

from collections import defaultdict

import pytest

TIERS = {"full_except": "full", "thorough_except": "thorough"}
"""The tier of the cases that each marker does not name."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every case that `full_except` or `thorough_except` does not name.

    Raises:
        pytest.UsageError: a named case does not exist, or a test has ``thorough_except`` without
            ``full`` or ``full_except``.
    """
    for name, tier in TIERS.items():
        _mark_cases(config, items, name, tier)


def is_of_single_cases(config: pytest.Config) -> bool:
    """Return whether the user asked for single cases, or for the last failures.

    Then cases that were not collected are not missing.
    """
    return config.getoption("lf", False) or any("::" in argument for argument in config.args)


def _mark_cases(config: pytest.Config, items: list[pytest.Item], name: str, tier: str) -> None:
    cases = defaultdict(set)
    named = {}
    for item in items:
        marker = item.get_closest_marker(name)
        if marker is None:
            continue
        is_early = tier == "thorough" and item.get_closest_marker("full") is None
        if is_early and item.get_closest_marker("full_except") is None:
            raise pytest.UsageError(f"{item.nodeid}: {name} is for tests that are marked full")
        case = item.callspec.id if hasattr(item, "callspec") else ""
        test = item.nodeid.partition("[")[0]
        cases[test].add(case)
        named[test] = set(marker.args)
        if case not in marker.args and not is_early:
            item.add_marker(getattr(pytest.mark, tier))
    if is_of_single_cases(config):
        return
    for test, expected in named.items():
        if missing := sorted(expected - cases[test]):
            raise pytest.UsageError(
                f"{test}: {name} names {missing}; the cases are {sorted(cases[test])}"
            )
