"""The README and the pages of docs/ are true: their examples run, their tables and links name what is there."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from dtensor_compile import Options
from dtensor_compile.passes import PASSES

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150 and len(README.split()) <= 1200


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page]):
        assert "://" in target or (ROOT / page).parent.joinpath(target).exists(), target


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"{pathlib.Path(page).name}" in navigation for page in PAGES if page.startswith("docs/"))


def test_first_example_runs_on_two_ranks(tmp_path):
    block = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    script = tmp_path / "example.py"
    script.write_text(block + "\nprint('done', flush=True)\ndist.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stderr[-2000:]


@pytest.mark.slow
def test_example_without_a_gpu_runs():
    (block,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGES["docs/without_a_gpu.md"], re.S)
        if "offline.device" in text
    ]
    result = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=250, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "all_reduce" in result.stdout and "sm_90" in result.stdout and "triton_" in result.stdout


def test_every_option_has_a_section_with_its_default():
    sections = dict(re.findall(r"^## `(\w+)`\n\n(.+)$", PAGES["docs/options.md"], re.M))
    options = {f.name: f.default for f in dataclasses.fields(Options) if f.name != "inductor"}
    assert sections.keys() == {*options, "inductor"}
    for name, default in options.items():
        shown = f'"{default}"' if isinstance(default, str) else default
        assert sections[name].endswith(f"Default: `{shown}`."), name


def test_passes_are_named():
    assert all(f"`{run.__name__}`" in PAGES["docs/options.md"] for run in PASSES)


def test_every_folder_is_explained():
    rows = "\n".join(line for line in PAGES["CONTRIBUTING.md"].splitlines() if line.startswith("|"))
    folders = {path.parent.name for path in (ROOT / "dtensor_compile").glob("*/__init__.py")}
    inside = {path.name for path in (ROOT / "dtensor_compile" / "compat").rglob("*")}
    assert set(re.findall(r"`(\w+)/`", rows)) - inside == folders


def test_make_targets_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^    )make ([\w-]+)", "\n".join(PAGES.values()), re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
