"""``dtensor-compile parity``: its answers and exit statuses, and the script that it writes."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile import cli
from dtensor_compile.graph.nodes import redistributions
from dtensor_compile.passes import PASSES
from dtensor_compile.stages import joint
from dtensor_compile.testing import RankError
from tests.stages import with_run

HERE = f"{__name__}:"


def model(mesh):
    torch.manual_seed(0)
    weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh["tp"], [Shard(0)]))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            y = torch.tanh(x) * 2
            return (y @ self.weight.t()).redistribute(placements=[Replicate()]).relu() + 1

    return Block(), distribute_tensor(torch.randn(4, 8), mesh["tp"], [Replicate()])


def wrong_model(mesh):
    """Compiled with a graph pass that is wrong: on the ranks, until they end."""

    def wrong(graph):
        for node in redistributions(graph):
            with graph.inserting_after(node):
                more = graph.call_function(torch.ops.aten.mul.Scalar, (node, 1.01))
            more.meta = dict(node.meta)
            node.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
        return []

    wrong.__name__ = PASSES[0].__name__
    with_run(joint, "PLAN", wrong.__name__, wrong).start()
    return model(mesh)


def nothing():
    return (lambda: None), []


def raises():
    raise ValueError("no such data")


def run(capsys, *argv):
    status = cli.main(["parity", *argv])
    return status, capsys.readouterr()


def test_an_equal_model_with_an_optimizer(capsys):
    status, output = run(
        capsys, f"{HERE}model", "--mesh", "tp=2", "--kernels", "aten", "--optimizer", "adamw", "--calls", "3"
    )
    assert status == 0 and output.out.startswith("equal: ") and "3 calls on 2 ranks" in output.out


@pytest.mark.slow
def test_a_difference_is_reported_bisected_and_minified(capsys, tmp_path):
    script = tmp_path / "small.py"
    try:
        status, output = run(
            capsys, f"{HERE}wrong_model", "--mesh", "tp=2", "--kernels", "aten", "--bisect", "--minify", str(script)
        )  # fmt: skip
        assert status == 1
        assert (
            "compiled differs from eager" in output.out and "rank 0: output" in output.out and "rank 1: " in output.out
        )
        assert f"the graph pass {PASSES[0].__name__} makes the difference" in output.out
        text = script.read_text()
        assert "redistribute" in text and "tanh" not in text and "relu" not in text, text
        spec = importlib.util.spec_from_file_location("small", script)
        module = importlib.util.module_from_spec(spec)
        import sys

        sys.modules["small"] = module
        spec.loader.exec_module(module)
        with pytest.raises(RankError, match="differs from eager"):  # the ranks still have the wrong pass
            module.test_program()
    finally:
        from dtensor_compile.testing import ranks

        ranks.end_jobs()


@pytest.mark.parametrize(
    "target, says",
    [
        pytest.param("nothing", "nothing to compare", marks=pytest.mark.slow),
        ("raises", "ValueError: no such data"),
        ("modle", "did you mean 'model'"),
        ("model", "mesh"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_status_2(capsys, target, says):
    extra = ["--mesh", "4by2"] if target == "model" else []
    status, output = run(capsys, f"{HERE}{target}", "--kernels", "aten", *extra)
    assert status == 2 and says in output.err and output.err.count("\n") == 1


def test_a_script_is_refused(capsys):
    status, output = run(capsys, "train.py")
    assert status == 2 and "train.py:function" in output.err
