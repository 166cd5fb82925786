"""The catalogue of causes as a documentation page, ``docs/causes.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtensor_compile.causes import CAUSES, Cause
from dtensor_compile.report.stock_causes import STOCK_CAUSES, breaks_under

_HEAD = """\
# Why a graph breaks

`dtensor-compile report` and `record()` name a cause for every graph break, by the codes of this page. \
`tools/docs.py` writes it.
Each example breaks for its cause (a test runs them), and the lines after `# instead` do the same in one graph.
In the examples `x` is a tensor, `d` a DTensor, `mesh` a mesh, `group` a process group.
"""

_UNDER = {
    "every backend": "Breaks under every backend.",
    "stock": 'Breaks under other backends; `backend="dtensor"` traces it.',
    "dtensor": 'Breaks under `backend="dtensor"` only.',
}


def causes_page() -> str:
    """Text of the page: our own causes, then torch's."""
    return "\n".join(
        [_HEAD, *_section("Where this backend ends a graph", CAUSES), *_section("Where torch does", STOCK_CAUSES)]
    )


def _section(title: str, causes: Mapping[str, Cause]) -> Iterator[str]:
    yield f"## {title}\n"
    for code in sorted(causes):
        this = causes[code]
        title = this.title[0].upper() + this.title[1:]
        yield f"### {code}\n\n**{title}.** {this.why} {_UNDER[breaks_under(this)]}\n\n{this.instead}\n"
        yield f"```python\n{this.example}\n```\n"
