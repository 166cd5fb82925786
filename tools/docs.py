"""Writes the files of docs/ that are made from the code: report.schema.json and causes.md.

python tools/docs.py            (a test fails while they are out of date)
"""

from __future__ import annotations

import json
import pathlib

from dtensor_compile.report.cause_pages import causes_page
from dtensor_compile.report.model import schema

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def pages() -> dict[str, str]:
    """File name -> text of every page that is made."""
    return {"report.schema.json": json.dumps(schema(), indent=2) + "\n", "causes.md": causes_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
