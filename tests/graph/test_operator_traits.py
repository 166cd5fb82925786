import pytest
import torch

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.graph import operator_traits as traits

aten = torch.ops.aten

#: An operator of each kind of view, with arguments.
CALLS = {
    aten.view.default: ([3, 4],), aten._unsafe_view.default: ([3, 4],), aten.reshape.default: ([3, 4],),
    aten.detach.default: (), aten.alias.default: (), aten.unsqueeze.default: (1,), aten.squeeze.dim: (0,),
    aten.squeeze.dims: ([0],), aten.transpose.int: (0, 1), aten.t.default: (), aten.permute.default: ([1, 0],),
    aten.slice.Tensor: (0, 1, 3), aten.select.int: (0, 1), aten.squeeze.default: (), aten.expand.default: ([2, 4, 3],),
    aten.split.Tensor: (2,), aten.split_with_sizes.default: ([1, 3],), aten.unbind.int: (),
}  # fmt: skip


def test_each_promise_of_a_view_implies_the_next():
    sets = (traits.SIZED_VIEWS, traits.SHAPE_VIEWS, traits.RESHAPES, traits.ORDERED_VIEWS)
    assert all(a < b for a, b in zip(sets, sets[1:])) and traits.RESHAPES < traits.VIEWS


@pytest.mark.parametrize("target", sorted(traits.ORDERED_VIEWS, key=str), ids=str)
def test_ordered_views_leave_elements_in_their_order(target):
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(target(x, *CALLS[target]).flatten(), x.flatten())


@pytest.mark.parametrize("target", sorted(traits.VIEWS & CALLS.keys(), key=str), ids=str)
def test_views_are_in_the_memory_of_their_argument(target):
    x = torch.arange(12.0).view(4, 3)
    made = target(x, *CALLS[target])
    first = made[0] if isinstance(made, (list, tuple)) else made
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("target", sorted(traits.IDENTITIES, key=str), ids=str)
def test_identities_give_what_they_get(target):
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(target(x), x)


def test_questions_about_an_operator():
    assert traits.is_pointwise(aten.mul.Tensor) and not traits.is_pointwise(aten.mm.default)
    assert draws(aten.rand.default) and draws(torch.ops.higher_order.run_with_rng_state) and not draws(aten.mul.Tensor)
    assert traits.is_view(aten.view.default) and not traits.is_view(aten.clone.default)
    assert traits.is_mutable(aten.add_.Tensor) and not traits.is_mutable(aten.add.Tensor)
    assert not any(ask("a text") for ask in (traits.is_pointwise, draws, traits.is_view, traits.is_mutable))
