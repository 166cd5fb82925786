"""What a process does that finds everything in Inductor's caches."""

import json
import os
import subprocess
import sys

import pytest
import torch

from dtensor_compile.compat.inductor.start_costs import _PROBE, quick_starts
from tests.cases import needs

pytestmark = needs("starts that only load")

#: Prints the commands that a compiled function starts, and whether Triton's files were read.
SCRIPT = """
import json, sys
seen = {"subprocess.Popen": [], "open": []}
sys.addaudithook(lambda event, args: seen[event].append(str(args[event != "open"])) if event in seen else None)
import torch
torch.set_num_threads(1)
x = torch.arange(60.0).view(6, 10)
step = lambda x: (x.sin() + 1).cumsum(0).relu()
seen["open"].clear()
torch.testing.assert_close(torch.compile(step, backend="dtensor")(x), step(x))
print(json.dumps([seen["subprocess.Popen"], any("libtriton" in name for name in seen["open"])]))
"""


def first_call(folder):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    commands, hashed = json.loads(done.stdout.splitlines()[-1])
    return [text for text in commands if "--version" not in text and "'-v'" not in text], hashed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_process_starts_no_compiler_and_no_probe(tmp_path):
    commands, _ = first_call(tmp_path)
    assert any("header" in text for text in commands) and any("LoadLibrary" in text for text in commands), commands
    assert first_call(tmp_path) == ([], torch.cuda.is_available())
    kernel = next(tmp_path.rglob("*.main.so"))
    whole = kernel.read_bytes()
    kernel.write_bytes(whole[:100])  # as a process leaves it that was killed
    commands, _ = first_call(tmp_path)
    assert any(str(kernel) in text for text in commands) and any("header" in text for text in commands), commands
    assert len(kernel.read_bytes()) == len(whole)


@pytest.mark.skipif(not _PROBE.is_there(), reason="this release has no such probe")
def test_a_library_is_tried_once_for_each_kind_of_processor(tmp_path, monkeypatch):
    from torch._inductor.cpu_vec_isa import VecISA

    tried = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: tried.append(command))
    isa, library = VecISA(), str(tmp_path / "library.so")
    with quick_starts():
        assert isa._probe_load(library) and isa._probe_load(library)
        assert len(tried) == 1
        monkeypatch.setattr("dtensor_compile.compat.inductor.start_costs.processor", lambda: "another")
        assert isa._probe_load(library)
    assert len(tried) == 2
    assert isa._probe_load(library) and len(tried) == 3
