"""The table of torch releases."""

import re

from dtensor_compile.compat.release import SUPPORTED, minor_release
from tests.tools import TOOLS, load_tool

matrix = load_tool("torch_matrix")


def test_it_runs_the_supported_releases_the_primary_one_first():
    assert tuple(map(minor_release, matrix.RELEASES)) == SUPPORTED


def test_the_newest_of_them_is_the_one_that_ci_runs():
    makefile = (TOOLS.parent / "Makefile").read_text()
    (newest,) = re.findall(r"^NEWEST_TORCH := (\S+)$", makefile, re.MULTILINE)
    assert newest == max(matrix.RELEASES, key=lambda release: tuple(map(int, release.split("."))))


def test_one_column_a_release_one_row_a_feature_and_reasons_for_gaps():
    found = {
        "2.13.0": {
            "date": "2026-01-01", "python": "3.11.7", "features": {"wings": [], "legs": []},
            "catalogue": {"a": ["PASS", ""], "b": ["PASS", ""], "c": ["BREAK", "gone"]},
            "tests": {"tests/x": {"counts": {"passed": 3}, "failed": []}},
        },
        "2.14.1": {
            "date": "2026-01-02", "python": "3.12.1", "features": {"wings": ["has no torch:flap"]},
            "tests": {
                "tests/x": {"counts": {"passed": 2, "failed": 1, "skipped": 1}, "failed": ["tests/x/test_y.py::test_z"]}
            },
            "catalogue": {"a": ["PASS", ""], "b": ["ERROR", "no wings"], "c": ["BREAK", "gone"]},
        },
        "2.11.0": {"error": "UnsupportedTorchError: no"},
    }  # fmt: skip
    text = matrix.document(found, "\nBy hand.\n")
    for line in (
        "| feature | 2.13.0 | 2.14.1 | 2.11.0 |",
        "| wings | yes | no (1) | no |",
        "| legs | yes | - | no |",
        "- 2.14.1, wings: torch has no torch:flap.",
        "- 2.11.0: UnsupportedTorchError: no",
        "| `tests/x` | 3 of 3 | 2 of 3 | not run |",
        "- 2.14.1: `tests/x/test_y.py::test_z`",
        "| PASS | 2 | 1 | not run |",
        "| ERROR | 0 | 1 | not run |",
        "| BREAK | 1 | 1 | not run |",
        "| program | 2.13.0 | 2.14.1 | what was seen |",
        "| `b` | PASS | ERROR | no wings |",
    ):
        assert line in text.splitlines()
    assert "| `a`" not in text and "| `c`" not in text
    assert text.endswith(matrix.BY_HAND + "\nBy hand.\n")


def test_outcomes_are_counted():
    text = (
        "PASSED tests/a.py::test_a\nFAILED tests/a.py::test_b - E\nSKIPPED [1] tests/a.py:3: no GPU\nPASSED "
        "tests/a.py::test_c\n"
    )
    assert matrix.count_tests(text) == {"passed": 2, "failed": 1, "skipped": 1}


def test_what_was_seen_of_a_program_is_one_line_without_paths():
    assert matrix.seen({"parity": ["ok", "ok"], "fullgraph_parity": "ok"}) == ""
    assert (
        matrix.seen({"parity": ["ok", "rank1: out: max abs err 2"], "compile_error": {"msg": "no"}})
        == "rank1: out: max abs err 2"
    )
    assert matrix.seen({"compile_error": {"msg": "in /home/me/a.py at 0x7f1a: a|b\nmore"}}) == "in a.py at : a/b"
    assert matrix.seen({"parity": ["ok"], "reasons": ["Unsupported branch"]}) == "Unsupported branch"
