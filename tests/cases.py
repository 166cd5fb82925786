"""Which cases of a parametrized test `make test` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, of which all but the `quick` ones are left to `make test-slow`.

    A case is a value, or a tuple of the values of several parameters.
    """
    cases = list(cases)
    assert all(case in cases for case in quick), f"{quick} are not all among {cases}"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
