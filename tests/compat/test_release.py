"""Releases of torch that are not supported are refused with what breaks there and the names of those that are."""

import warnings

import pytest
import torch

from dtensor_compile import UnsupportedTorchError
from dtensor_compile.compat.release import SUPPORTED, check_release, minor_release


def test_the_installed_release_is_supported():
    assert minor_release(torch.__version__) in SUPPORTED


def test_the_primary_release_passes_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_release("2.13.0+cpu")


def test_a_release_that_is_supported_in_part_warns():
    with pytest.warns(UserWarning, match=r"supports torch 2\.14\.1\+cu130 in part: .*docs/releases\.md"):
        check_release("2.14.1+cu130")


@pytest.mark.parametrize(
    "version, breaks",
    [
        ("2.11.0", "Known to break: a collective of constants"),
        ("2.12.1+cu126", "It was not tried"),
        ("2.15.0a0+git1234", "newer than all that were tried"),
        ("3.0.0", "newer than all that were tried"),
        ("2.1.3", "older than all that were tried; what breaks with 2.11"),
    ],
)
def test_another_release_is_an_error_that_says_what_breaks_and_names_the_supported_ones(version, breaks):
    with pytest.raises(UnsupportedTorchError, match=r"Supported: 2\.13\.x, 2\.14\.x") as error:
        check_release(version)
    assert version in str(error.value) and breaks in str(error.value)


def test_minor_release():
    assert minor_release("2.13.0+cpu") == "2.13" == SUPPORTED[0]
