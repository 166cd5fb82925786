"""Releases of torch that are not supported are refused with the names of those that are."""

import pytest
import torch

from dtensor_compile import UnsupportedTorchError
from dtensor_compile.compat.release import KNOWN_TO_BREAK, SUPPORTED, check_release, minor_release


def test_the_installed_release_is_supported():
    check_release(torch.__version__)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu126", "2.14.1", "3.0.0", "2.1.3"])
def test_another_release_is_an_error_that_names_the_supported_ones(version):
    with pytest.raises(UnsupportedTorchError, match=r"Supported: 2\.13\.x") as error:
        check_release(version)
    assert version in str(error.value)
    known = KNOWN_TO_BREAK.get(minor_release(version), "it was never tried there")
    assert f"{version}: {known}." in str(error.value)


def test_minor_release():
    assert minor_release("2.13.0+cpu") == "2.13" == SUPPORTED[0]
