import importlib
import pathlib

import pytest

from dtensor_compile import fixups

NAMES = sorted(file.stem for file in pathlib.Path(fixups.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_each_mend_says_what_it_waits_for(name):
    lines = (importlib.import_module(f"dtensor_compile.fixups.{name}").__doc__ or "").splitlines()
    found = [line.partition(":")[0] for line in lines if line.startswith(("Upstream: ", "Releases: ", "Remove when: "))]
    assert found == ["Upstream", "Releases", "Remove when"]
