"""The form of a report: it goes to JSON and comes back, fits the published schema, and refuses what is none."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jsonschema
import pytest
import torch

from dtensor_compile.report import model
from dtensor_compile.report.model import ReportFormatError, from_json, schema, to_dict, to_json
from tests.report.samples import sample_report

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_json_and_back():
    report = sample_report()
    assert from_json(to_json(report)) == report


def test_fits_the_published_schema():
    published = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    jsonschema.validate(to_dict(sample_report()), published)


def test_what_does_not_fit_is_refused_by_the_schema():
    data = to_dict(sample_report())
    data["ours"]["redistributions"][0]["fate"] = "lost"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema())


@pytest.mark.slow
def test_pages_are_up_to_date():
    tool = [sys.executable, str(ROOT / "tools" / "docs.py"), "--check"]  # other tests add features to this process
    differing = subprocess.run(tool, capture_output=True, text=True, check=True).stdout.split()
    primary = torch.__version__.startswith("2.13.")  # other releases have other functions to replace
    assert set(differing) <= (set() if primary else {"patches.md"}), (
        f"run python tools/docs.py: {differing} are out of date"
    )


@pytest.mark.parametrize(
    "text, says",
    [
        ("no json", "not JSON"),
        ("[]", "its version is None"),
        ('{"version": "0.1"}', "its version is '0.1'"),
        (json.dumps({"version": model.VERSION, "ours": 3}), "not a report"),
    ],
)
def test_other_text_is_refused(text, says):
    with pytest.raises(ReportFormatError, match=says):
        from_json(text)


def test_a_later_minor_version_with_more_in_it_is_read():
    data = to_dict(sample_report())
    data["version"] = model.VERSION.split(".")[0] + ".99"
    data["more"] = 1
    assert dataclasses.replace(from_json(json.dumps(data)), version=model.VERSION) == sample_report()
