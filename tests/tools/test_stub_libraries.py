"""Libraries that stand in for those to which a library is linked and that are not there."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.tools import load_tool

stub_libraries = load_tool("stub_libraries")

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("gcc", "readelf", "nm", "ldconfig"))), reason="there is no gcc or no binutils here"
)


def linked(folder: pathlib.Path, versioned: bool) -> pathlib.Path:
    """``libuser.so``, which calls two functions of ``libfar.so.3``; that one is removed."""
    (folder / "far.c").write_text("int far_one(void) { return 0; } int far_two(void) { return 0; }")
    (folder / "far.map").write_text("FAR_1 { global: far_one; }; FAR_2 { global: far_two; };")
    (folder / "user.c").write_text(
        "int far_one(void); int far_two(void); int both(void) { return far_one() + far_two(); }"
    )
    shared, script = ["gcc", "-shared", "-fPIC"], [f"-Wl,--version-script={folder}/far.map"] if versioned else []
    far, user = folder / "libfar.so.3", folder / "libuser.so"
    subprocess.run([*shared, "-Wl,-soname,libfar.so.3", *script, "-o", far, folder / "far.c"], check=True)
    subprocess.run([*shared, "-Wl,-rpath,$ORIGIN", "-o", user, folder / "user.c", far], check=True)
    far.unlink()
    return user


def loaded(user: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """What a process of its own says, which has no other library of that name."""
    code = f"import ctypes; print(ctypes.CDLL({str(user)!r}).both())"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("versioned", [False, True])
def test_a_library_loads_with_a_stub_of_what_it_lacks(tmp_path, versioned):
    folder = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "lib"
    folder.mkdir(parents=True)
    user = linked(folder, versioned)
    assert "libfar.so.3: cannot open" in loaded(user).stderr
    assert stub_libraries.stub_missing(tmp_path) == ["libfar.so.3"]
    assert loaded(user).stdout == "2\n"  # each function of a stub returns 1
    assert stub_libraries.stub_missing(tmp_path) == []  # nothing is missing any more


def test_without_torch_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no torch in"):
        stub_libraries.stub_missing(tmp_path)
