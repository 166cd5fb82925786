"""accelerate's launcher takes the backend's names where `integrations.accelerate_launch` stands in front of it."""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

FRONT = "dtensor_compile.integrations.accelerate_launch"
OPTIONS = [
    "--cpu",
    "--num_processes",
    "1",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "dtensor_aten",
]
SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters
from beside import SIZE

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = accelerator.prepare(torch.nn.Linear(SIZE, 1))
accelerator.backward(model(torch.ones(2, SIZE) * accelerator.process_index).sum())
gradient = next(model.parameters()).grad[0, 0].item()
plugin = accelerator.state.dynamo_plugin
compiled = counters["stats"]["unique_graphs"] > 0
print("launched", __name__, sys.argv[1:], plugin.backend.value, accelerator.num_processes, gradient, compiled)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def launched(module, arguments, world=1, cwd=None):
    """What each of `world` processes says that the launcher starts on a CPU; accelerate itself starts several only
    through MPI.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    started = []
    for rank in range(world):
        environment = (
            os.environ
            | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            | (job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
        )
        command = [sys.executable, "-W", "ignore", "-m", module, *OPTIONS, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, cwd=cwd, **pipes))
    output = []
    for process in started:
        out, err = process.communicate(timeout=200)
        output.append([line for line in out.splitlines() if line.startswith("launched")] or [err])
    return output


def test_accelerate_itself_refuses_the_name(script):
    assert "invalid choice: 'dtensor_aten'" in launched("accelerate.commands.launch", [script])[0][0]


def test_a_script_is_started_with_the_name_on_each_rank(script):
    output = launched(FRONT, [script, "--epochs", "3"], world=2)
    assert output == [["launched __main__ ['--epochs', '3'] DTENSOR_ATEN 2 1.0 True"]] * 2


def test_a_module_is_started_with_the_name(script):
    (output,) = launched(FRONT, ["-m", "train", "--epochs", "3"], cwd=script.parent)
    assert output == ["launched __main__ ['--epochs', '3'] DTENSOR_ATEN 1 0.0 True"]


def test_another_program_than_python_is_an_error(script):
    (output,) = launched(FRONT, ["--no_python", "true"])
    assert "--no_python starts no Python" in output[0]
