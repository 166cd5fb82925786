"""Results that are an input taken for another kind of number: ``view_as_complex``, ``view_as_real``, ``view(dtype)``,
``conj``.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks

REAL, COMPLEX = torch.float32, torch.complex64
VIEWS = {
    "view_as_complex": (REAL, torch.view_as_complex),
    "a slice of view_as_complex": (REAL, lambda x: torch.view_as_complex(x)[:, 1:]),
    "view_as_complex transposed": (REAL, lambda x: torch.view_as_complex(x).transpose(0, 1)),
    "view_as_complex beside another result": (REAL, lambda x: (torch.view_as_complex(x), x * 2)),
    "view_as_real": (COMPLEX, torch.view_as_real),
    "view_as_real of a slice": (COMPLEX, lambda x: torch.view_as_real(x[:, 1:])),
    "imag": (COMPLEX, lambda x: x.imag),
    "conj": (COMPLEX, lambda x: x.conj()),
    "conj transposed": (COMPLEX, lambda x: x.transpose(0, 1).conj()),
    "int32": (REAL, lambda x: x.view(torch.int32)),
    "int16": (REAL, lambda x: x.view(torch.int16)),
    "int16 of a slice": (REAL, lambda x: x[:, 1:].view(torch.int16)),
    "float64": (REAL, lambda x: x.view(torch.float64)),
}


#: Those that `make test` compiles: of each kind one.
QUICK = (
    "view_as_complex",
    "view_as_complex beside another result",
    "view_as_real of a slice",
    "conj transposed",
    "int16 of a slice",
    "float64",
)


def made(rows, dtype, grad):
    torch.manual_seed(rows)
    local = torch.randn(rows, 4, 2) if dtype is REAL else torch.randn(rows, 4, dtype=COMPLEX)
    return DTensor.from_local(local, make_mesh((2,), ("dp",)), [Shard(0)], run_check=False).requires_grad_(grad)


def first(results):
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize(
    "names", [pytest.param(tuple(VIEWS), marks=pytest.mark.slow, id="all"), pytest.param(QUICK, id="some")]
)
@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.slow), None])
@pytest.mark.parametrize("backend", ["dtensor_aten", pytest.param("dtensor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_numbers_of_another_kind_in_the_memory_of_an_input(backend, dynamic, names):
    for name in names:
        dtype, view = VIEWS[name]
        for grad in (False, True):
            torch._dynamo.reset()
            counters.reset()
            compiled = torch.compile(view, backend=backend, dynamic=dynamic, fullgraph=True)
            for rows in (4, 6):
                x, y = made(rows, dtype, grad), made(rows, dtype, grad)
                want, got = first(view(x)), first(compiled(y))
                local, expected = got._local_tensor, want._local_tensor
                about = name, grad, rows
                assert (got.dtype, local.dtype, got.shape) == (want.dtype, want.dtype, want.shape), about
                assert (got.placements, got.requires_grad) == (want.placements, want.requires_grad), about
                assert torch.equal(local, expected), about
                if backend == "dtensor_aten":  # Inductor copies a slice before it takes its bits for others
                    assert local.untyped_storage().data_ptr() == y._local_tensor.untyped_storage().data_ptr(), about
                if want.requires_grad:
                    for result in (want, got):
                        result.abs().square().sum().redistribute(placements=[Replicate()]).backward()
                    assert torch.equal(y.grad._local_tensor, x.grad._local_tensor), about
