"""Which cases of a parametrized test `make test` runs, and which tests a release of torch can run."""

from collections.abc import Iterable
from typing import Any

import pytest

from dtensor_compile.compat.patches import FEATURES


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, of which all but the `quick` ones are left to `make test-slow`.

    A case is a value, or a tuple of the values of several parameters.
    """
    cases = list(cases)
    assert all(case in cases for case in quick), f"{quick} are not all among {cases}"
    return [case if case in quick else _slow(case) for case in cases]


def needs(feature: str) -> pytest.MarkDecorator:
    """Skips tests where torch lacks what a feature needs; the reason says what."""
    problems = "; ".join(FEATURES[feature].problems())
    return pytest.mark.skipif(bool(problems), reason=f"torch {problems}")


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
