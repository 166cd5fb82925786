"""On a GPU that is there (``make test-gpu``): the figures of `tools/bench/gpu.py` are what they have to be."""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "bench" / "gpu.py"

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU: torch.cuda.is_available() is false"
)


def run(*arguments, timeout=280):
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


SMALL = ("--layers", "2", "--dim", "256", "--repeats", "7")
LAYOUTS = ("tp", "fsdp", "fully_shard", "fully_shard_tp")
ON_GPU = [(ranks, layout) for ranks in (1, 2, 4) for layout in LAYOUTS if (ranks, layout) != (2, "fully_shard_tp")]


@functools.cache
def figures(*arguments):
    """Ranks -> layout -> row -> variant -> figure."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(*SMALL, "--json", f"{folder}/f.json", *arguments)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return json.loads(pathlib.Path(folder, "f.json").read_text())["ranks"]


def on_gpu(ranks, layout):
    return figures("--ranks", "1", "2", "4", "--layouts", *LAYOUTS)[str(ranks)][layout]


@needs_gpu
@pytest.mark.parametrize("ranks, layout", ON_GPU)
def test_numbers_are_those_of_eager(ranks, layout):
    found = on_gpu(ranks, layout)
    assert "ours" in found["loss"]
    for variant in found["loss"].keys() - {"eager"}:
        assert found["loss"][variant] < 1e-4 and found["gradient"][variant] < 1e-3, (
            variant,
            found["loss"],
            found["gradient"],
        )


@needs_gpu
@pytest.mark.parametrize("ranks, layout", ON_GPU)
def test_local_compute_is_tritons_and_memory_is_at_most_eagers(ranks, layout):
    found = on_gpu(ranks, layout)
    assert found["triton"]["eager"] == 0 < found["triton"]["ours"]
    assert found["other"]["ours"] < found["other"]["eager"]
    assert found["memory"]["ours"] <= found["memory"]["eager"]


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_at_most_what_stocks_does(layout):
    found = on_gpu(1, layout)["step"]
    assert found["ours"] <= 1.05 * found.get("stock", found["eager"]), found  # what two runs of one program differ by


@pytest.mark.slow
def test_without_a_gpu_it_is_said_and_nothing_is_measured():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("--ranks", "1")
    assert done.returncode == 2 and "there is no GPU" in done.stderr and not done.stdout


@pytest.mark.slow
def test_the_program_runs_on_the_cpu_where_it_is_only_tried():
    found = figures("--check-on-cpu", "--ranks", "2", "--layouts", "tp")["2"]["tp"]
    assert found["loss"]["ours"] < 1e-5 and found["gradient"]["ours"] < 1e-4
