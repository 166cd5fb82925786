"""The tables of what torch_xla computes, where this checkout has them beside it."""

import json
import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PLACES = [
    ROOT / "shared",
    ROOT.parent / "shared",
    *([pathlib.Path(os.environ["SHARED"])] if "SHARED" in os.environ else []),
]
FILES = [path for place in PLACES for path in [place / "reference" / "spmd_tables.json"] if path.exists()]
TABLES = json.loads(FILES[0].read_text()) if FILES else {"stated": {}, "op_sharding_args": [], "hybrid_mesh": []}

needs_tables = pytest.mark.skipif(not FILES, reason="reference/spmd_tables.json is not beside this checkout")


def as_spec(value):
    return tuple(as_spec(v) if isinstance(v, list) else v for v in value)
