"""``dtensor-compile kernels``."""

import pytest

from dtensor_compile import cli
from dtensor_compile.compat.inductor.triton import triton_version

pytestmark = [
    pytest.mark.skipif(triton_version() is None, reason='Triton is not installed: pip install "dtensor-compile[test]"'),
    *(
        pytest.mark.filterwarnings(f"ignore:{text}")
        for text in ("TensorFloat32 tensor cores", "TRITON_DEFAULT_FP_FUSION")
    ),
]

MODEL = """
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    print("built")
    return model, torch.randn(8, 64)

def number():
    return 1

def fails():
    raise ValueError("no such layer")
"""


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return file


def test_order_and_table_are_printed_and_files_written(model, tmp_path, capsys):
    folder = tmp_path / "out"
    options = ["--mesh", "tp=4", "--gpu", "a100", "--save", str(folder), "--max-spills", "0"]
    assert cli.main(["kernels", f"{model}:build", *options]) == 0
    output = capsys.readouterr().out
    assert (
        output.startswith("graph 0, forward\n\noperator addmm\n")
        and "graph 1, backward" in output
        and "built" not in output
    )
    assert "start    all_reduce_ #0 float32[8, 64]\nwait     all_reduce_ #0\n" in output
    assert "NVIDIA A100-SXM4-80GB, sm_80" in output
    names = sorted(path.name for path in folder.iterdir())
    assert {"0_forward.py", "1_backward.py"} < set(names)
    assert (
        sum(name.endswith(".cubin") for name in names)
        == sum(name.endswith(".ptx") for name in names)
        == output.count("XBLOCK")
        > 0
    )


def test_a_limit_that_is_broken(model, capsys):
    assert cli.main(["kernels", f"{model}:build", "--no-backward", "--max-spills", "-1"]) == 1
    assert "spills 0 bytes, more than -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["{model}:build", "--gpu", "h20"],
            "GPU 'h20' is neither a file nor a preset; did you mean 'h200'? presets: a100, h100",
        ),
        (["{model}"], "kernels takes a function"),
        (["{model}:number"], "returns neither a model and its inputs nor a step"),
        (["{model}:fails"], "ValueError: no such layer"),
        (["{model}:build", "--rank", "2"], "2 is no rank of a job of 2 ranks"),
        (["{model}:build", "--mesh", "tp:4"], "--mesh tp:4 is not a mesh"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line_and_status_2(model, arguments, message, capsys):
    assert cli.main(["kernels", *(a.format(model=model) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
