"""Functions, classes, files and folders that are larger than the house allows, and names that are short or used twice.

    python tools/sizes.py            (ends with status 1 where there are any)

Functions have at most 60 lines, classes 200, files 400, docstrings and decorators included; folders of `compat/` have
at most 15 modules. A class name, and a name of a module, stands for one thing; a public function has at least five
letters."""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parent.parent / "dtensor_compile"
MOST = {"function": 60, "class": 200, "file": 400}
#: Modules in a folder of `compat/`.
MODULES = 15
LETTERS = 5
#: Short all the same: entry points, names that torch gave (`variables/collectives.py`), the public `offline.job`, and
#: `hook` beside `patch` (`compat/patches.py`), in the declarations of which it stands two hundred times.
SHORT = {"main", "send", "recv", "job", "hook"}


def lengths(file: pathlib.Path) -> Iterator[tuple[str, str, int]]:
    """Kind, name and lines of a file, and of each function and class in it."""
    text = file.read_text()
    yield "file", "", len(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            assert node.end_lineno is not None
            yield (
                "class" if isinstance(node, ast.ClassDef) else "function",
                node.name,
                node.end_lineno - node.lineno + 1,
            )


def short_names(file: pathlib.Path) -> Iterator[str]:
    """Public functions of a module with names of few letters."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and len(node.name) < LETTERS and node.name[0] != "_":
            yield node.name


def full_folders() -> Iterator[str]:
    """Folders of `compat/` with too many modules."""
    for folder in [path for path in (PACKAGE / "compat").rglob("*") if path.is_dir()]:
        if (count := len([file for file in folder.glob("*.py") if file.stem != "__init__"])) > MODULES:
            yield f"{folder.relative_to(PACKAGE.parent)}: {count} modules, {MODULES} are allowed"


def main() -> int:
    """Prints them; returns the exit status."""
    found, classes, modules = [], collections.defaultdict(list), collections.defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE.parent)
        found += [
            f"{where}: {name} has fewer than {LETTERS} letters" for name in short_names(file) if name not in SHORT
        ]
        if file.stem != "__init__":
            modules[file.stem].append(str(where))
        for kind, name, lines in lengths(file):
            if kind == "class" and not name.startswith("_"):
                classes[name].append(str(where))
            if lines > MOST[kind]:
                found.append(f"{where}: {kind} {name} has {lines} lines, {MOST[kind]} are allowed".replace("  ", " "))
    found += full_folders()
    for what, names in (("class", classes), ("module", modules)):
        found += [
            f"{what} {name} is {len(places)} things: {', '.join(places)}"
            for name, places in sorted(names.items())
            if len(places) > 1
        ]
    print("\n".join(found) or "none")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
