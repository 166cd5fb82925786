import re

import pytest
import torch

from dtensor_compile.graph.arguments import (
    const_arg,
    fake_result,
    function_of,
    list_arg,
    node_arg,
    operator_of,
    sizes_of,
    value_of,
    values_of,
)
from dtensor_compile.graph.node_builder import add_call, inherited

aten = torch.ops.aten


@pytest.fixture
def graph():
    made = torch.fx.Graph()
    x = made.placeholder("x")
    x.meta = {"val": torch.ones(4, 3), "tensor_meta": "of x", "seq_nr": 7}
    made.output(x)
    return made


def _node(graph, target, *args):
    (x,) = graph.find_nodes(op="placeholder")
    with graph.inserting_before(graph.output_node()):
        return add_call(graph, target, (x, *args), meta=inherited(x))


def test_arguments_come_with_their_types(graph):
    (x,) = graph.find_nodes(op="placeholder")
    view = _node(graph, aten.view.default, [3, 4])
    assert node_arg(view, 0) is x and list_arg(view, 1) == [3, 4] and list_arg(view, -1) == [3, 4]
    assert const_arg(_node(graph, aten.select.int, 0, 1), 2, int) == 1
    assert operator_of(view) is aten.view.default is function_of(view)


def test_an_error_names_node_argument_and_what_was_found(graph):
    select = _node(graph, aten.select.int, 0, 1)
    with pytest.raises(
        TypeError, match=re.escape("argument 1 of select_int = aten.select.int(x, 0, 1) is a int, not a Node")
    ):
        node_arg(select, 1)
    with pytest.raises(TypeError, match="argument 3 of .* is a NoneType, not a str"):
        const_arg(select, 3, str)
    with pytest.raises(TypeError, match="argument 1 of .* is a int, not a list"):
        list_arg(select, 1)
    with pytest.raises(TypeError, match="x is a placeholder of 'x', and calls no function"):
        function_of(node_arg(select, 0))
    with pytest.raises(TypeError, match="output = output.* gives a NoneType, not a tensor"):
        value_of(graph.output_node())


def test_a_new_node_has_its_own_value_and_the_origin_of_another(graph):
    view = _node(graph, aten.view.default, [3, 4])
    assert value_of(view).shape == (3, 4) and view.meta["seq_nr"] == 7 and "tensor_meta" not in view.meta
    with graph.inserting_before(graph.output_node()):
        given = add_call(graph, aten.view.default, view.args, meta=inherited(view, ("seq_nr",)), value="given")
    assert given.meta == {"val": "given"} and fake_result(given).shape == (3, 4)


def test_values_of_several_results(graph):
    parts = _node(graph, aten.split.Tensor, 2)
    assert [tuple(value.shape) for value in values_of(parts)] == [(2, 3), (2, 3)]
    assert sizes_of([4, _node(graph, aten.sym_size.int, 0)]) == [4, 4]
