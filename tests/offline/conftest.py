"""These tests compile with Triton, which is made for Linux alone; elsewhere they are skipped."""

import pathlib

import pytest

from dtensor_compile.compat.inductor.triton import triton_version

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    if triton_version() is None:
        missing = pytest.mark.skip(reason='Triton is not installed: pip install "dtensor-compile[test]"')
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(missing)
