"""The machine for which a report estimates times: the one that the program is for, and the first screen says why."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_compile import explain
from dtensor_compile.graph.node_costs import device_of
from dtensor_compile.recording.recorder import GraphRecord, Recording, record
from dtensor_compile.report.html import to_html
from dtensor_compile.report.machine import machine_of
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS
from tests.report.test_table import text_of


def double(x):
    return x * 2


def test_times_of_a_program_on_cpus_are_of_cpus_and_the_first_screen_says_why():
    report = explain(double)(torch.ones(4))
    why = "assumed, since it computes on cpu; --cluster or cluster= names another"
    assert (report.cluster, report.cluster_from) == ("cpu-1gbit", why)
    assert f"\ntimes are estimates for cpu-1gbit ({why})\n" in text_of(report)
    assert f"<b>cpu-1gbit</b> ({why})</li>" in to_html(report)
    compute = sum(graph.compute_seconds for graph in report.ours.graphs)
    assert compute == pytest.approx(CLUSTERS["cpu-1gbit"].device.launch, rel=0.1)


def test_a_machine_that_is_asked_for_is_taken():
    report = explain(double, cluster="a100")(torch.ones(4))
    assert (report.cluster, report.cluster_from) == ("a100", "as asked for")


def test_a_topology_that_the_program_names_is_taken():
    torch._dynamo.reset()
    with record() as recording:
        torch.compile(double, backend="dtensor", options={"topology": "h200", "kernels": "aten"})(torch.ones(4))
    assert recording.report().cluster == "h200" and recording.report(cluster="v100").cluster == "v100"


@pytest.mark.parametrize(
    "there, cluster, why",
    [
        (GPUS["a100"].name, "a100", f"it runs on {GPUS['a100'].name}"),
        ("a GPU of tomorrow", "h100", "assumed, since it computes on cuda; --cluster or cluster= names another"),
        (None, "h100", "assumed, since it computes on cuda; --cluster or cluster= names another"),
    ],
)
def test_a_program_on_a_gpu(monkeypatch, there, cluster, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: there)
    machine = machine_of(Recording(graphs=[GraphRecord("forward"), GraphRecord("backward", device="cuda")]))
    assert (machine.cluster.name, machine.known_from) == (cluster, why)


def test_a_graph_computes_on_an_accelerator_where_it_has_a_tensor_there():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x).cpu()).graph
    with FakeTensorMode():
        for node, device in zip(graph.nodes, ("cpu", "cuda", "cpu")):
            node.meta["val"] = torch.empty(4, device=device)
    assert device_of(graph) == "cuda"
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4)
    assert device_of(graph) == "cpu"
