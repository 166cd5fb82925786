"""Tests of the tools, which are files and no package."""

import importlib.util
import pathlib
import sys
from types import ModuleType

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    """The module of ``tools/NAME.py``; the same for tools that import each other, and for Dynamo, which imports the
    modules of the functions that it inlines.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
