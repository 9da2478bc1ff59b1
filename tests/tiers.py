"""Put the cases of one test into two tiers.

A pytest plugin, loaded by ``conftest.py``. ``make test`` runs the tests without the markers
``full``, ``thorough`` and ``browser``, and ``make test-full`` also those with ``full``. A
parametrized test often needs only a few of its cases in the first tier. It names these by their
ids, and all other cases are ``full``:

    @pytest.mark.full_except("chain", "dynamic")
    @pytest.mark.parametrize("shape", SHAPES)
    def test_something(shape): ...
"""

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every case that `full_except` does not name as ``full``.

    Raises:
        pytest.UsageError: a named case does not exist.
    """
    cases = defaultdict(set)
    names = {}
    for item in items:
        marker = item.get_closest_marker("full_except")
        if marker is None:
            continue
        case = item.callspec.id if hasattr(item, "callspec") else ""
        test = item.nodeid.partition("[")[0]
        cases[test].add(case)
        names[test] = set(marker.args)
        if case not in marker.args:
            item.add_marker(pytest.mark.full)
    if any("::" in argument for argument in config.args):
        return  # the user named single cases: the rest are not missing
    for test, expected in names.items():
        if missing := sorted(expected - cases[test]):
            raise pytest.UsageError(
                f"{test}: full_except names {missing}; the cases are {sorted(cases[test])}"
            )
