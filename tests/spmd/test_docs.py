"""Every example of docs/from_torch_xla.md runs, and its table names what is there."""

import pathlib
import re

import pytest

import dtensor_compile.spmd as spmd
from dtensor_compile.testing import on_ranks

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "from_torch_xla.md").read_text()
SETUP = re.search(r"```python\n(.*?)```", TEXT, re.S).group(1)
EXAMPLES = re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", TEXT, re.S | re.M)


@pytest.mark.slow
@on_ranks(4, timeout=290)
def test_examples_run():
    failed = []
    for title, code in EXAMPLES:
        try:
            code = code.replace('backend="dtensor"', 'backend="dtensor_aten"')  # Inductor's part has tests of its own
            exec(compile(SETUP + code, f"from_torch_xla.md, {title}", "exec"), {"__name__": "example"})
        except Exception as error:  # noqa: BLE001 - each is reported
            failed.append(f"{title}: {type(error).__name__}: {str(error)[:800]}")
    assert not failed, "\n".join(failed)


def test_links_and_names():
    titles = {title.lower().replace(" ", "-") for title, _ in EXAMPLES}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) == titles and len(titles) == 9
    for name in spmd.__all__:
        assert f"`{name}" in TEXT or f"{name}(" in TEXT or f"`Mesh.{name}" in TEXT or name == "OpSharding", name
