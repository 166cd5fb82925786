"""Both ways of a call, in C++ and as torch does it, in a job of two ranks that is simulated in this process."""

import pytest
import torch

from dtensor_compile.compat.aot import unwrap
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.dynamo import counters, guards
from dtensor_compile.compat.inductor import input_fetch_codegen as fetch
from dtensor_compile.native.loader import native
from dtensor_compile.testing import make_mesh
from tests.runtime import needs_native


@pytest.fixture(scope="module")
def job():
    with simulated_job(2, 0):
        yield


# `make test` runs both ways for guards (`tests/runtime/test_guards.py`), and C++ alone for the others.
@pytest.fixture(params=[pytest.param("native", marks=needs_native), pytest.param("torch", marks=pytest.mark.slow)])
def mesh(request, job, monkeypatch):
    if request.param == "torch":
        for module in (fetch, guards, unwrap):
            monkeypatch.setattr(module, "native", lambda: None)
    else:
        assert native() is not None, "a C++ compiler is needed"
    counters.reset()
    torch.manual_seed(0)
    return make_mesh((2,), ("tp",))
