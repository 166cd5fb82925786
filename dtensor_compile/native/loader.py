"""The C++ part of a compiled call, built once per machine and torch release; without it, torch's own code is used.

Its sources are in `native_code/`, one subject per file. Callable objects, each made once, at compile time:

- ``Guard(example, sizes, strides, local_sizes, local_strides, any_size)(object)``: whether a tensor is like the one for
  which the graph was compiled. It compares what the guard of a plain tensor compares, for the DTensor and for its local
  tensor, and the spec: first by identity, then mesh, placements, shard order and dtype.
- ``Unwrap(plan)(arguments)``: the inputs of the graph, with local tensors and meshes instead of DTensors.
- ``Wrap(plan, accumulate)(results)``: DTensors made of results, with specs that are only remade for another mesh or
  other sizes. With `accumulate`, a gradient is accumulated directly into ``.grad`` of its parameter if autograd would
  do nothing else.
- ``Fetch(roots, plan)(*objects)``: the inputs of a graph, read from `objects`, in a tuple. The plan is a list of reads
  ``(from, step, key, wanted)``: `from` is the index of an earlier read, or ``-1 - i`` for object `i`; the step is one
  of `READS`: an attribute, an item, a gradient, or the value or key at a position of a dict.
- ``GuardAll(roots, plan, checks)(*objects)``: whether everything that such a walk finds is as the graph was compiled
  for. A check ``(index, expected)`` requires that a `Guard` accepts a read, that it has a type, or that it is the same
  object as another read.
- ``Layouts(expected, complain)(tensors)``: checks that tensors have the sizes and strides of `expected`, a tuple of
  ``(sizes, strides)``; calls ``complain(tensor, sizes, strides, "input")`` for one that does not.
- ``Arguments(values, hold)()``: the arguments of a call while they are unchanged: a list, or None once a tensor was
  freed or mutated. With `hold`, tensors are kept alive.

Functions of a tuple of values: ``own_storages``, whether all tensors in it, or local tensors of DTensors, have distinct
storages; ``increment_versions``, equivalent to ``torch.autograd.graph.increment_version``; ``detached_views``, a list
of its tensors with views detached; ``without_wrappers``, whether none is a ``torch.func`` wrapper.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.decisions import Decision

log = logging.getLogger("dtensor_compile")

#: Steps of a plan of ``Fetch``.
READS = {"attribute": 0, "item": 1, "gradient": 2, "value_at": 3, "key_at": 4}

_NAME = "dtensor_compile_native"
_SOURCES = pathlib.Path(__file__).with_name("native_code")
#: Libraries of torch that the module is linked with.
_LIBRARIES = ("torch_python", "torch_cpu", "c10")


@functools.cache
def native() -> Any:
    """The C++ module, whose members are listed above; None, with a warning, if there is no compiler or it fails.

    The first call on a machine builds it (20 s). None before torch 2.13, too: tensors have other internals there, and
    guards would accept too much. ``DTENSOR_COMPILE_NATIVE=0`` in the environment disables it; ``CXX`` names the
    compiler, optionally with flags.
    """
    if os.environ.get("DTENSOR_COMPILE_NATIVE") == "0" or torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        return None
    try:
        module = _load(built_library(_NAME, _SOURCES / "module.cpp", _LIBRARIES))
        module.configure(DTensor, torch.Tensor._dtensor__new__)
    except (OSError, ImportError, AttributeError, TypeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _refused.append(str(reason))
        log.warning("calls are as slow as under torch: the C++ part of dtensor_compile could not be built (%s)", reason)
        return None
    return module


#: The reason why the module could not be built; empty otherwise.
_refused: list[str] = []


def without_native() -> list[Decision]:
    """The decision that calls are as slow as under torch, if the C++ module is missing."""
    if native() is not None:
        return []
    why = _refused[0] if _refused else "DTENSOR_COMPILE_NATIVE=0, or a torch release before 2.13"
    reason = f"guards, arguments and results of DTensors are handled in Python, as under torch: {why}"
    return [Decision("native_calls", "", reason, left_alone=True)]


def built_library(name: str, main: pathlib.Path, libraries: Sequence[str]) -> pathlib.Path:
    """The library compiled from `main`; built now unless it exists for the sources, this torch and this Python.

    Args:
        libraries: of torch, to link with.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails.
    """
    command = _command(main, libraries)
    source = b"".join(path.read_bytes() for path in sorted(main.parent.iterdir()) if path.is_file())
    key = hashlib.sha256(source + repr((command, torch.__version__, sys.version)).encode()).hexdigest()[:16]
    folder = _folder()
    target = folder / f"{name}-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the ranks that start together builds it
        if not target.exists():
            log.info("building %s", target)
            made = pathlib.Path(scratch) / target.name
            subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True)
            made.replace(target)
    return target


def _folder() -> pathlib.Path:
    """The folder where torch keeps compiled extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return pathlib.Path(root) if root else pathlib.Path.home() / ".cache" / "torch_extensions" / "dtensor_compile"


def _command(main: pathlib.Path, libraries: Sequence[str]) -> list[str]:
    from torch.utils import cpp_extension  # slow: it imports setuptools

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: set CXX, or install g++")
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        *shlex.split(compiler), "-O2", "-std=c++20", "-fPIC", "-shared", abi,
        *(f"-I{path}" for path in includes), str(main), *folders, *(f"-l{library}" for library in libraries),
    ]  # fmt: skip


def _load(path: pathlib.Path) -> types.ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None  # because a loader is given
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
