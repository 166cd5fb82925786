"""Checks sizes and strides of all inputs in one call in the code that Inductor generates.

torch:  assert_size_stride(primals_1, (4, ), (1, ), 'input') ... and so for each input
here:   input_layouts((primals_1, primals_2, ...))
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import hook, needs, patch
from dtensor_compile.native import layouts

if TYPE_CHECKING:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

#: With fewer inputs, the call costs more than it saves.
FEWEST = 4


_ASSERTS = patch("torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_input_size_asserts", "self")


@needs(
    "layouts of inputs checked in one call",
    _ASSERTS,
    hook("torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_deferred_input_asserts", "self input_names"),
    without="inputs are checked one by one, as in torch",
    upstream="#184752, #177719",
    remove_when="Inductor checks the layouts of all inputs in one call",
)
@contextlib.contextmanager
def inputs_checked_at_once() -> Iterator[None]:
    """While active, code that Inductor generates on this thread checks inputs of static sizes and strides in
    one call."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    def write(stock: Any, self: PythonWrapperCodegen) -> None:
        stock(self)
        if type(self) is PythonWrapperCodegen:
            _at_once(self)

    with patched(_ASSERTS, write):
        yield


def _at_once(code: PythonWrapperCodegen) -> None:
    waiting = code._pending_input_asserts
    constant = {name: layout for name, texts in waiting.items() if (layout := _numbers(texts)) is not None}
    if len(constant) < FEWEST:
        return
    for name in constant:
        del waiting[name]
    code.header.writeline(f"from {layouts.__name__} import layouts")
    code.header.writeline(f"input_layouts = layouts({list(constant.values())!r}, assert_size_stride)")
    code.prefix.writeline(f"input_layouts(({', '.join(constant)},))")


def _numbers(texts: tuple[str, str]) -> layouts.Layout | None:
    """Sizes and strides as Inductor writes them; None if any is computed."""
    try:
        sizes, strides = (ast.literal_eval(text) for text in texts)
    except ValueError:
        return None
    return sizes, strides
