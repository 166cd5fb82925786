"""Stands in for libraries for GPUs that an installed torch is linked to and that are not there: empty ones, so that a
build of torch for GPUs runs on a CPU without the gigabytes that they take.

    python -m pip install --no-deps torch==2.15.0
    python tools/stub_libraries.py PREFIX        # of that Python: a folder with lib/python3.11/site-packages/torch

Each library that ``torch/lib`` needs and neither holds nor finds on the machine is made by gcc, with the symbols that
are asked of it, in the versions in which they are. A function of a stub returns 1, an error to CUDA. Reads ELF with
``readelf`` and ``nm`` of binutils; elsewhere than on Linux there is nothing to do.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping

#: Version of a symbol, or "" -> names of symbols.
Versions = Mapping[str, set[str]]


def _output(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _needed(library: pathlib.Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-dW", library))


def _version_owners(library: pathlib.Path) -> dict[str, str]:
    """Version of a symbol -> the library of which it is asked."""
    owners: dict[str, str] = {}
    owner = ""
    for line in _output("readelf", "-VW", library).splitlines():
        if found := re.search(r"Version: \d+ +File: (\S+)", line):
            owner = found[1]
        elif owner and (found := re.search(r"Name: (\S+) +Flags", line)):
            owners[found[1]] = owner
    return owners


def _symbols(library: pathlib.Path, which: str) -> Iterable[tuple[str, str]]:
    """Names and versions of the dynamic symbols that are ``"undefined"`` or ``"defined"`` there; weak ones may be
    missing.
    """
    for line in _output("nm", "-D", f"--{which}-only", library).splitlines():
        kind, symbol = line.split()[-2:]
        if which == "defined" or kind == "U":
            name, _, version = symbol.partition("@")
            yield name, version.lstrip("@")


def _on_this_machine() -> dict[str, pathlib.Path]:
    found = re.findall(r"^\s+(\S+) .* => (\S+)$", _output("ldconfig", "-p"), re.MULTILINE)
    return {name: pathlib.Path(path) for name, path in reversed(found)}


def missing_libraries(folder: pathlib.Path) -> dict[str, Versions]:
    """Libraries that those in `folder` need and that are neither there nor on the machine, with the symbols asked of
    them; symbols without a version, of which no library is known, are asked of the first.
    """
    here = {path.name: path for path in sorted(folder.glob("*.so*"))}
    machine = _on_this_machine()
    missing: dict[str, dict[str, set[str]]] = {}
    unversioned: set[str] = set()
    known: dict[str, pathlib.Path] = dict(here)
    for path in here.values():
        needed = _needed(path)
        known |= {name: machine[name] for name in needed if name in machine}
        absent = [name for name in needed if name not in here and name not in machine]
        for name in absent:
            missing.setdefault(name, collections.defaultdict(set))
        owners = _version_owners(path)
        for version, owner in owners.items():
            if owner in absent:
                missing[owner][version]  # noqa: B018 - a version is looked for even if no symbol has it
        for name, version in _symbols(path, "undefined") if absent else ():
            if version in owners and owners[version] in absent:
                missing[owners[version]][version].add(name)
            elif not version and not re.match("_?Py", name):  # the interpreter has those
                unversioned.add(name)
    if missing:
        unversioned -= {name for path in known.values() for name, _ in _symbols(path, "defined")}
        unversioned -= {name for of in missing.values() for names in of.values() for name in names}
        missing[min(missing)][""] = unversioned
    return {name: dict(of) for name, of in missing.items()}


def make_stub(path: pathlib.Path, symbols: Versions) -> None:
    """Makes a library with functions of these names.

    Raises:
        subprocess.CalledProcessError: gcc cannot make it.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, script = pathlib.Path(folder, "stub.c"), pathlib.Path(folder, "versions")
        names = sorted({name for of in symbols.values() for name in of})
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
        command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(path), f"-Wl,-soname,{path.name}", str(source)]
        versions = {version: sorted(of) for version, of in symbols.items() if version}
        if versions:
            nodes = [
                f"{version} {{ {'global: ' * bool(of)}{''.join(map('{};'.format, of))} }};"
                for version, of in versions.items()
            ]
            script.write_text("\n".join(nodes) + "\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True, capture_output=True)


def stub_missing(prefix: pathlib.Path) -> list[str]:
    """Makes what the torch of the Python at `prefix` is linked to and lacks; returns the names of the libraries.

    Raises:
        FileNotFoundError: there is no torch there, or no gcc or binutils.
        subprocess.CalledProcessError: a library cannot be read, or made.
    """
    if not sys.platform.startswith("linux"):
        return []
    folder = next(prefix.glob("lib/python3*/site-packages/torch/lib"), None)
    if folder is None:
        raise FileNotFoundError(f"no torch in {prefix}")
    missing = missing_libraries(folder)
    for name, symbols in missing.items():
        make_stub(folder / name, symbols)
    return sorted(missing)


if __name__ == "__main__":
    print("\n".join(stub_missing(pathlib.Path(sys.argv[1]))))
