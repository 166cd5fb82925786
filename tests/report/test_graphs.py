"""Paths of modules in Dynamo's own words, and in ours."""

import types

import pytest

from dtensor_compile.report.graphs import module_path


@pytest.mark.parametrize(
    "words, path",
    [
        ("L['self'].blocks.0.attention", "blocks.0.attention"),
        ("L['self']", ""),
        ("L['fn'].2", "2"),
        ("L__self___blocks.0", "blocks.0"),
        ("L['model'].layers.1", "model.layers.1"),
        ("L['model']", "model"),
        ("G['net'].head", "net.head"),
        ("L['self']._modules['blocks']._modules['3'].wq", "blocks.3.wq"),
        ("L['self'].layers[4].wq", "layers.4.wq"),
    ],
)
def test_module_path(words, path):
    node = types.SimpleNamespace(meta={"nn_module_stack": {"1": ("L['self']", object), "2": (words, object)}})
    assert module_path(node) == path


def test_a_node_of_the_backward_has_the_path_of_its_forward():
    node = types.SimpleNamespace(meta={"fwd_nn_module_stack": {"1": ("L['self'].head", object)}})
    assert module_path(node) == "head"


def test_no_module():
    assert module_path(types.SimpleNamespace(meta={})) == ""
