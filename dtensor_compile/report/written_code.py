"""Kernels between the start of a collective and its wait, read from the code that Inductor wrote.

Input: the text of generated Python (`torch._inductor.utils.run_and_get_code`, or ``Graph.source`` of an emulated
device). Output: its collectives in order, each with the kernels between its start and its first wait.

    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0, 2, '1')
    extern_kernels.mm(arg1, arg2, out=buf1)
    torch.ops._c10d_functional.wait_tensor.default(buf0)                        all_gather_into_tensor over '1': ('mm',)

This is the last text before a machine runs it; earlier graphs only show the intention. All kernels count equally,
however short, so that this finds collectives that cannot be hidden, but does not show that one is fully hidden.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

_COLLECTIVE = ("torch.ops._c10d_functional.", "torch.ops.dtensor_compile.all_")
_WAIT = "torch.ops._c10d_functional.wait_tensor."
#: Functions called by generated code that are not kernels: checks, allocation, views of memory.
_NO_KERNEL = (
    "torch.ops.inductor",
    "extern_kernels.set_",
    "torch.ops._c10d_functional",
    "torch.ops.dtensor_compile.all_",
)


@dataclass(eq=False)
class WrittenCollective:
    """A collective of generated code.

    Attributes:
        name: of the operator, without overload.
        group: name of the process group.
        between: names of the kernels between its start and its first wait.
        is_waited: whether there is a wait.
    """

    name: str
    group: str
    between: list[str] = field(default_factory=list)
    is_waited: bool = False


def written_collectives(source: str) -> list[WrittenCollective]:
    """The collectives of generated code, in the order in which they start.

    Raises:
        SyntaxError: `source` is not Python.
    """
    found: list[WrittenCollective] = []
    by_name: dict[str, WrittenCollective] = {}
    for target, call in _calls(ast.parse(source)):
        called = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(call, ast.Call) and called.startswith(_WAIT):
            _note_wait(by_name.get(_variable(call.args[0])))
        elif isinstance(call, ast.Call) and called.startswith(_COLLECTIVE):
            this = _started(call, called)
            found.append(this)
            by_name.update(dict.fromkeys({target, *_written_over(call, called)}, this))
        elif kernel := _kernel(called):
            _note_kernel(found, kernel)
        elif target and (source_of := _variable(call)) in by_name and (not called or called == "reinterpret_tensor"):
            by_name[target] = by_name[source_of]  # an item of a list, a view, another name
        elif target:
            by_name.pop(target, None)
    return found


def _note_wait(this: WrittenCollective | None) -> None:
    """Marks a collective as waited for; None is a variable that is not written by a collective here."""
    if this is not None:
        this.is_waited = True


def _note_kernel(found: list[WrittenCollective], kernel: str) -> None:
    """Adds a kernel to each collective that has not been waited for yet."""
    for this in found:
        if not this.is_waited:
            this.between.append(kernel)


def without_work(source: str) -> list[WrittenCollective]:
    """The collectives of generated code without a kernel between start and wait."""
    return [this for this in written_collectives(source) if not this.between]


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Variable and value of every statement of the function ``call``, in order; the variable is empty if nothing is
    assigned.
    """
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            yield from _values(function.body)


def _values(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for statement in body:
        if isinstance(statement, ast.Assign):
            yield ast.unparse(statement.targets[0]), statement.value
        elif isinstance(statement, ast.Expr):
            yield "", statement.value
        for inner in ("body", "orelse", "finalbody"):
            yield from _values(getattr(statement, inner, []))


def _variable(value: ast.expr) -> str:
    """The variable of a value: itself, the list of an item, or the base of a view."""
    while not isinstance(value, ast.Name):
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call) and value.args:
            value = value.args[0]
        else:
            return ""
    return value.id


def _started(call: ast.Call, called: str) -> WrittenCollective:
    texts = [
        a.value
        for a in (*call.args, *(k.value for k in call.keywords))
        if isinstance(a, ast.Constant) and isinstance(a.value, str)
    ]
    return WrittenCollective(called.split(".")[3], texts[-1] if texts else "")


def _written_over(call: ast.Call, called: str) -> list[str]:
    """Variables whose memory a collective writes to: its inputs if it works in place, or ``out``."""
    out = [_variable(keyword.value) for keyword in call.keywords if keyword.arg == "out"]
    if called.split(".")[-2].endswith("_"):
        given = call.args[0]
        out += [_variable(item) for item in (given.elts if isinstance(given, ast.List) else [given])]
    return out


def _kernel(called: str) -> str:
    """The name of the called kernel; empty if it is none."""
    if called.startswith(_NO_KERNEL):
        return ""
    if called.startswith("extern_kernels."):
        return called.removeprefix("extern_kernels.")
    if called.startswith("torch.ops."):
        return ".".join(called.split(".")[2:4])
    if called.startswith("aten."):
        return called
    if called.startswith("triton_") and called.endswith(".run"):
        return called.removesuffix(".run")
    return called if called.startswith("cpp_") else ""
