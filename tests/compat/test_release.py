"""Releases of torch that are not supported are refused with the names of those that are; of those in part an import
warns.
"""

import warnings

import pytest
import torch

from dtensor_compile import UnsupportedTorchError
from dtensor_compile.compat.release import SUPPORTED, check_release, minor_release


def test_the_installed_release_is_supported():
    assert minor_release(torch.__version__) in SUPPORTED


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1+cu130"])
def test_a_release_that_is_supported_whole_passes_without_a_word(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_release(version)


def test_a_release_that_is_supported_in_part_warns():
    with pytest.warns(
        UserWarning, match=r"supports torch 2\.11\.0 in part: the C\+\+ part is not used.*docs/releases\.md"
    ):
        check_release("2.11.0")


@pytest.mark.parametrize(
    "version, how_far",
    [
        ("2.12.1+cu126", "It was not tried"),
        ("2.16.0a0+git1234", "newer than all that were tried"),
        ("3.0.0", "newer than all that were tried"),
        ("2.1.3", "older than all that were tried"),
    ],
)
def test_another_release_is_an_error_that_names_the_supported_ones(version, how_far):
    with pytest.raises(UnsupportedTorchError, match=r"Supported: 2\.13\.x, 2\.14\.x, 2\.15\.x, 2\.11\.x") as error:
        check_release(version)
    assert version in str(error.value) and how_far in str(error.value)


def test_minor_release():
    assert minor_release("2.13.0+cpu") == "2.13" == SUPPORTED[0]
