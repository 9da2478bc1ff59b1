"""Check that the test cases which mutants name exist and belong to `make test`.

A pytest plugin, loaded by ``conftest.py``. The ids of cases are known only after pytest has
collected a file. So each run checks the files that it collects as wholes. The names of the tests
themselves are checked without collecting them, in ``test_mutants.py``.
"""

from collections.abc import Iterable

import pytest

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.mutant import Mutant
from tests.mutants.trial import NOT_IN_MAKE_TEST
from tests.tiers import is_of_single_cases


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run while a mutant names a case that is missing or in a later tier.

    Raises:
        pytest.UsageError: with all such cases.
    """
    if is_of_single_cases(config):
        return
    if problems := problems_of(CATALOGUE, items):
        raise pytest.UsageError("\n".join(problems))


def problems_of(mutants: Iterable[Mutant], items: Iterable[pytest.Item]) -> list[str]:
    """Return a sentence for each named case of a collected file that `make test` does not run."""
    slower = {
        item.nodeid: [name for name in NOT_IN_MAKE_TEST if item.get_closest_marker(name)]
        for item in items
    }
    files = {node.partition("::")[0] for node in slower}
    problems = []
    for mutant in mutants:
        for node in mutant.tests:
            if "[" not in node or node.partition("::")[0] not in files:
                continue
            if node not in slower:
                problems.append(f"mutant {mutant.name}: there is no case {node}")
            elif slower[node]:
                problems.append(f"mutant {mutant.name}: {node} is {', '.join(slower[node])}")
    return problems
