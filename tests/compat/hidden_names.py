"""A small program, compiled in processes from which names of torch are hidden.

`verdict_without` forks: torch is imported already, this package is not.
"""

import ast
import builtins
import contextlib
import io
import multiprocessing
import pathlib
import sys
import types
import warnings

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

COMPAT = pathlib.Path(__file__).parents[2] / "dtensor_compile" / "compat"


def _is_private(module: str, name: str) -> bool:
    return any(part.startswith("_") for part in (*module.split("."), name))


def imported_names() -> dict[str, set[str]]:
    """Module of torch -> the private names, or names in private modules, that modules of `compat` import at their
    top.
    """
    found: dict[str, set[str]] = {}
    for file in sorted(COMPAT.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                names = {alias.name for alias in node.names if _is_private(node.module, alias.name)}
                found.setdefault(node.module, set()).update(names)
    return {module: names for module, names in found.items() if names}


def hide(module: str, names: set[str] | None) -> None:
    """From now on modules of `compat` cannot import these names from a module of torch, or (None) the module."""
    stock = builtins.__import__

    def hidden(name, globals=None, locals=None, fromlist=(), level=0):
        if (
            name != module
            or not fromlist
            or not (globals or {}).get("__name__", "").startswith("dtensor_compile.compat.")
        ):
            return stock(name, globals, locals, fromlist, level)
        if names is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        found = stock(name, globals, locals, fromlist, level)
        left = [each for each in fromlist if each not in names]
        return types.SimpleNamespace(**{each: getattr(found, each) for each in left})

    builtins.__import__ = hidden


def _program(mesh, x, weight):
    return (x @ weight).redistribute(mesh, [Replicate()]).sin().sum().full_tensor()


def _answer(pipe, module, names) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    expected = _program(mesh, x, weight)
    (expected_gradient,) = torch.autograd.grad(expected, weight)
    hide(module, names)
    errors = []
    with warnings.catch_warnings(record=True) as seen, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            out = torch.compile(_program, backend="dtensor_aten")(mesh, x, weight)
            (gradient,) = torch.autograd.grad(out, weight)
            torch.testing.assert_close((out, gradient.to_local()), (expected, expected_gradient.to_local()))
        except Exception as error:
            while error is not None:
                errors.append(f"{type(error).__name__}: {error}")
                error = error.__cause__ or error.__context__
    pipe.send((errors, [str(warning.message) for warning in seen]))


def verdict_without(module: str, names: set[str] | None, seconds: float = 120.0) -> tuple[list[str], list[str]]:
    """Errors (the one that came, and its causes) and warnings of the program without these names of torch."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs, module, names))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else (["no answer"], [])
    except EOFError:
        return ["the process died"], []
    finally:
        process.kill()
        process.join()


def is_as_it_should_be(errors: list[str]) -> bool:
    """Right numbers, or an error that names what torch has no more."""
    return not errors or any(e.startswith("UnsupportedTorchError") and " has no torch." in e for e in errors)


def main(places: list[str]) -> int:
    """Prints a verdict for each place, ``module:name`` or ``module:`` (all of them without any); returns the exit
    status.
    """
    pairs = [(module, name) for module, _, name in (place.partition(":") for place in places)]
    if not pairs:
        pairs = [(module, "") for module in imported_names() if _is_private(module, "")]
        pairs += [(module, name) for module, names in imported_names().items() for name in sorted(names)]
    wrong = 0
    for module, name in pairs:
        errors, _ = verdict_without(module, {name} if name else None)
        good = is_as_it_should_be(errors)
        wrong += not good
        print(
            "named" if good and errors else "right" if good else "WRONG",
            f"{module}:{name}",
            *errors[: 0 if good else 2],
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
