"""Older releases of torch than those that are supported are refused with the names of those that are; newer ones run
with a warning, as those do that are supported in part.
"""

import warnings

import pytest
import torch

from dtensor_compile import UnsupportedTorchError
from dtensor_compile.compat import patches
from dtensor_compile.compat.patches import MissingHookWarning, feature, hook
from dtensor_compile.compat.release import SUPPORTED, check_release, is_untried, minor_release


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
        ("2.1.3", "older than all that were tried"),
    ],
)
def test_another_release_is_an_error_that_names_the_supported_ones(version, how_far):
    with pytest.raises(UnsupportedTorchError, match=r"Supported: 2\.13\.x, 2\.14\.x, 2\.15\.x, 2\.11\.x") as error:
        check_release(version)
    assert version in str(error.value) and how_far in str(error.value)


@pytest.mark.parametrize("version", ["2.16.0a0+git1234", "3.0.0"])
def test_a_newer_release_runs_unless_that_is_forbidden(version, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_release(version)
    monkeypatch.setenv("DTENSOR_COMPILE_TORCH", "known")
    with pytest.raises(UnsupportedTorchError, match="newer than all that were tried"):
        check_release(version)


def test_any_release_runs_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("DTENSOR_COMPILE_TORCH", "any")
    check_release("2.1.3")
    monkeypatch.setenv("DTENSOR_COMPILE_TORCH", "some")
    with pytest.raises(ValueError, match="DTENSOR_COMPILE_TORCH is 'some'; it may be 'known' or 'any'"):
        check_release("2.13.0")


def test_an_untried_release_is_named_once_with_the_features_that_are_off(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    monkeypatch.setattr(patches, "FEATURES", {})
    monkeypatch.setattr(patches, "is_untried", lambda: is_untried("2.16.0"))
    off = feature("gears", hook("torch._gone:gone"), without="nothing turns")
    feature("wheels", hook("torch._dynamo:reset"), without="nothing rolls")
    with pytest.warns(MissingHookWarning) as seen:
        patches.warn_of_untried_release()
        assert not off.works()
    (warning,) = seen
    assert "was not tried with torch 2.16.0" in str(warning.message)
    assert "gears (has no torch._gone:gone)" in str(warning.message) and "wheels" not in str(warning.message)


def test_minor_release():
    assert minor_release("2.13.0+cpu") == "2.13" == SUPPORTED[0]
