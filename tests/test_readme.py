"""The README is true: its first example runs, its tables name what is there."""

import dataclasses
import pathlib
import re
import subprocess
import sys

from dtensor_compile import Options
from dtensor_compile.passes import PASSES

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_first_example_runs_on_two_ranks(tmp_path):
    block = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    script = tmp_path / "example.py"
    script.write_text(block + "\nprint('done', flush=True)\ndist.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stderr[-2000:]


def test_example_without_a_gpu_runs():
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.S) if "offline.device" in text]
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "all_reduce" in result.stdout and "sm_90" in result.stdout and "triton_" in result.stdout


def test_options_table_names_every_option_and_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", README, re.M))
    ours = {f.name: repr(f.default) for f in dataclasses.fields(Options) if f.name != "inductor"}
    assert {name: default.replace('"', "'") for name, default in rows.items()} == ours


def test_passes_are_named():
    assert all(f"`{run.__name__}`" in README for run in PASSES)


def test_folders_are_there():
    for folder in re.findall(r"^\| `(\w+)/`", README, re.M):
        assert (ROOT / "dtensor_compile" / folder).is_dir()


def test_make_targets_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([\w-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target
