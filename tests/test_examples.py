"""The layouts of the examples train to the same numbers as eager, in one graph, with no more collectives and bytes than
stock.
"""

import json

import pytest

from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, compare, gradient_difference, loss_difference
from dtensor_compile.testing import make_mesh, run_on_ranks

SMALL = LlamaConfig(layers=1, dim=64, ffn_dim=192, heads=8, kv_heads=4, vocab=256, sequence=32)


def train(name, world):
    layout = LAYOUTS[name]
    runs = compare(layout, make_mesh(layout.mesh_shape(world), layout.dims), SMALL, steps=10, timed=0)
    eager = runs[0]
    return {
        run.name: {
            "loss": loss_difference(run, eager),
            "gradient": gradient_difference(run, eager),
            "breaks": run.graph_breaks,
            "graphs": run.graphs,
            "nodes": run.redistributions,
            "collectives": run.collectives,
            "bytes": run.bytes_sent,
        }
        for run in runs[1:]
    }


@pytest.mark.slow
@pytest.mark.parametrize("name, world", [("tp", 2), ("tp", 4), ("fsdp", 2), ("2d", 4)])
def test_layout_trains_like_eager(name, world):
    answers = run_on_ranks(world, train, name, world, timeout=280)
    print(json.dumps(answers[0], indent=2))
    for runs in answers:
        ours = runs["ours"]
        assert ours["breaks"] == 0 and ours["graphs"] == 1
        assert ours["loss"] < 1e-5 and ours["gradient"] < 1e-5
        assert ours["nodes"] > 0
        assert ours["collectives"] > 0 and ours["bytes"] > 0
        assert ours["collectives"] <= runs["stock"]["collectives"]
        assert ours["bytes"] <= runs["stock"]["bytes"]
