"""Collectives and messages of ``torch.distributed`` in compiled code: one graph, and what eager gives, gradients
included.
"""

import operator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable  # noqa: F401 - programs of this file name it in text
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


# ---- programs: of x (4, 2), another value on each rank, which requires a gradient ----------------------------------


def all_reduce(x):
    y = x * 2
    dist.all_reduce(y)
    return y * y


def all_reduce_saves_before(x):
    y = x.exp()  # autograd saves the result, which the collective then changes
    dist.all_reduce(y)
    return y


def all_reduce_of_a_row(x):
    y = x * 2
    dist.all_reduce(y[1], op=MAX)
    return y * y


def all_reduce_of_an_input_without_gradient(x):
    y = x.detach()
    dist.all_reduce(y)
    return x * y


def all_reduce_average_of_loss(x):
    loss = (x * x).mean()
    with torch.no_grad():
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        logged /= size()
    return loss, logged


def all_reduce_the_same_twice(x):
    y, z = x * 2, x * 2
    dist.all_reduce(y)
    dist.all_reduce(z)
    dist.all_reduce(z)
    return y + z


def all_reduce_complex(x):
    y = torch.complex(x.detach(), x.detach() + 1)
    dist.all_reduce(y)
    return x * y.real * y.imag


def all_reduce_coalesced(x):
    a, b = x.detach() * 2, x.detach().sum()
    dist.all_reduce_coalesced([a, b])
    return a + b + x


def asynchronous(x):
    y, z = x.detach() * 2, x.detach() + 1
    works = [dist.all_reduce(t, async_op=True) for t in (y, z)]
    w = x * 3
    for work in works:
        work.wait()
    return w + y * z, works[0].is_completed()


def asynchronous_future(x):
    y = x.detach() * 2
    future = dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0] / size())
    return x + future.wait()


def asynchronous_unused(x):
    y = x.detach() * 2
    dist.all_reduce(y, async_op=True)
    return x + 1


def all_gather_into_tensor(x):
    out = x.new_empty(size() * x.shape[0], x.shape[1])
    work = dist.all_gather_into_tensor(out, x.detach(), async_op=True)
    work.wait()
    return out * 2 + x.sum()


def all_gather(x):
    outs = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(outs, x.detach())
    return torch.cat(outs) + x.sum()


def reduce_scatter(x):
    out = x.new_empty(x.shape[0] // size(), x.shape[1])
    dist.reduce_scatter_tensor(out, x * 2)
    return out * 3 + x.sum()


def reduce_scatter_list(x):
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x * (i + 1) for i in range(size())], op=MAX)
    return out * 3


def all_to_all(x):
    outs = [torch.empty_like(part) for part in x.chunk(size())]
    dist.all_to_all(outs, [part.detach().contiguous() for part in x.chunk(size())])
    return torch.cat(outs) + x


def all_to_all_uneven(x):
    sent, received = ([1, 3], [1, 2]) if rank() == 0 else ([2, 2], [3, 2])
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x * 2, received, sent)
    return out.sum(0) + x


def broadcast(x):
    y = x * 2
    dist.broadcast(y, src=1)
    return y * y


def broadcast_asynchronous_in_a_group(x):
    y = x.detach().clone()
    dist.broadcast(y, group_src=0, group=dist.group.WORLD, async_op=True).wait()
    return y + x


def reduce(x):
    y = x.detach() * 2
    dist.reduce(y, dst=1)
    return x * y if rank() == 1 else x + 1


def gather(x):
    outs = [torch.empty_like(x) for _ in range(size())] if rank() == 1 else None
    dist.gather(x.detach(), outs, dst=1)
    return torch.cat(outs) + x.sum() if outs is not None else x + 1


def scatter(x):
    y = torch.empty_like(x)
    dist.scatter(y, [x.detach() + i for i in range(size())] if rank() == 0 else None, src=0)
    return y * x


def barriers(x):
    y = x * 2
    dist.barrier()
    dist.barrier(async_op=True).wait()
    return y + 1


def send_and_receive(x):
    y = torch.empty_like(x)
    if rank() == 0:
        dist.send(x.detach(), 1)
        sender = dist.recv(y, 1)
    else:
        sender = dist.recv(y, 0)
        dist.send(x.detach() + y, 0)
    return y * x, sender


def both_send_first(x):
    y = torch.empty_like(x)
    works = [dist.isend(x.detach(), 1 - rank()), dist.irecv(y, 1 - rank())]
    for work in works:
        work.wait()
    return y * x


def both_receive_first(x):
    y = torch.empty_like(x)
    received = dist.irecv(y, 1 - rank())
    sent = dist.isend(x.detach().exp(), 1 - rank())
    z = x * 2
    received.wait()
    sent.wait()
    return y * z


def equal_messages_are_sent_twice(x):
    y, z = torch.empty_like(x), torch.empty_like(x)
    if rank() == 0:
        dist.send(x.detach(), 1)
        dist.send(x.detach(), 1)
        return x * 2
    dist.recv(y, 0)
    dist.recv(z, 0)
    return x + y * z


def ring(x):
    total, block = x.detach().clone(), x.detach().clone()
    for _ in range(size() - 1):
        arrived = torch.empty_like(block)
        operations = [
            dist.P2POp(dist.isend, block, (rank() + 1) % size()),
            dist.P2POp(dist.irecv, arrived, (rank() - 1) % size(), tag=0),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = total + arrived.relu()
        block = arrived
    return total * x


def messages_between_collectives(x):
    y = torch.empty_like(x)
    total = x.detach().clone()
    dist.all_reduce(total)
    if rank() == 0:
        dist.send(total * 2, 1)
        dist.all_reduce(total)
    else:
        dist.recv(y, 0)
        dist.all_reduce(total)
    return x * total


def pipeline_with_a_loss_on_the_last_stage(x):
    y = torch.tanh(x)
    if rank() == 0:
        dist.send(y.detach(), 1)
        return y
    arrived = torch.empty_like(x)
    dist.recv(arrived, 0)
    return (y + arrived).pow(2)


def methods_of_a_group(x):
    group = dist.group.WORLD
    y, z = x.detach().clone(), x.detach() + 1
    group.allreduce([y]).wait()
    group.allreduce(z, MAX).wait()
    group.broadcast(z, 1).wait()
    group.barrier().wait()
    return x * y * z


def in_a_function(x):
    return _Reduce.apply(x * 2) + 1


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad * 2


def under_checkpointing(x):
    def block(t):
        total = t.detach().sum(0)
        dist.all_reduce(total)
        return torch.tanh(t * total).exp()

    return checkpoint(block, x, use_reentrant=False) * 2


def group_of_others(x):
    y = x * 2
    dist.all_reduce(y, group=dist.GroupMember.NON_GROUP_MEMBER)
    return y


def from_local_with_check(x):
    mesh = make_mesh((2,), ("tp",))
    return DTensor.from_local(x * 1, mesh, [Replicate()], run_check=True).to_local() * 2


COLLECTIVES = [
    all_reduce, all_reduce_saves_before, all_reduce_of_a_row, all_reduce_of_an_input_without_gradient,
    all_reduce_average_of_loss,
    all_reduce_the_same_twice, all_reduce_complex, all_reduce_coalesced, asynchronous, asynchronous_future,
    asynchronous_unused,
    all_gather_into_tensor, all_gather, reduce_scatter, reduce_scatter_list, all_to_all, all_to_all_uneven, broadcast,
    broadcast_asynchronous_in_a_group, reduce, gather, scatter, barriers, methods_of_a_group, in_a_function,
    under_checkpointing,
    group_of_others, from_local_with_check,
]  # fmt: skip
MESSAGES = [
    send_and_receive, both_send_first, both_receive_first, equal_messages_are_sent_twice, ring,
    messages_between_collectives,
    pipeline_with_a_loss_on_the_last_stage,
]  # fmt: skip


def loss(out):
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.arange(out.numel()).view(out.shape) * (1 + rank())).sum()


def value():
    torch.manual_seed(rank())
    return torch.randn(4, 2, requires_grad=True)


def check(program, **options):
    with torch.random.fork_rng():
        assert_parity(program, [value()], loss=loss, **{"backend": "dtensor_aten", **options})


@pytest.mark.parametrize("program", COLLECTIVES + MESSAGES, ids=operator.attrgetter("__name__"))
@on_ranks(2)
def test_program(program):
    check(program)


@pytest.mark.parametrize("program", [all_reduce, gather, both_receive_first], ids=operator.attrgetter("__name__"))
@on_ranks(2)
def test_program_through_inductor(program):
    check(program, backend="dtensor")


DIFFERENTIABLE = """
differentiable.all_reduce(x * 2)
torch.cat(differentiable.all_gather(x * 2))
differentiable.all_to_all_single(torch.empty_like(x), x * 2)
torch.cat(differentiable.all_to_all([torch.empty(1, 2), torch.empty(3, 2)], [x[:1], x[1:]])) if rank() == 0 else \
torch.cat(differentiable.all_to_all([torch.empty(3, 2), torch.empty(1, 2)], [x[:3], x[3:]]))
differentiable.broadcast(x * 2, 1)
differentiable.reduce(x * 2, 1) * rank()
torch.cat(differentiable.gather(x * 2, 1))
differentiable.scatter([x * 1, x * 3], 1)
differentiable.reduce_scatter(torch.empty_like(x), [x * 1, x * 3])
"""


@pytest.mark.parametrize(
    "expression", [e for e in DIFFERENTIABLE.strip().splitlines() if "[:1]" not in e and "[:3]" not in e]
)
@on_ranks(2)
def test_differentiable_collective(expression):
    check(eval(f"lambda x: {expression}"))


# ---- inputs, recompilation, refusals -------------------------------------------------------------------------------


@on_ranks(2)
def test_leaf_that_requires_a_gradient_is_changed_in_place():
    def program(x):
        dist.all_reduce(x)
        return x * x

    check(program)


@on_ranks(2)
def test_new_sizes_and_a_new_group():
    def program(x, group):
        y = x * 2
        dist.all_reduce(y, group=group)
        out = x.new_empty(group.size() * x.shape[0], 2)
        dist.all_gather_into_tensor(out, x, group=group)
        return y, out

    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    for n in (4, 4, 5, 6):
        x = torch.arange(2.0 * n).view(n, 2) + rank()
        assert not compare_values("result", program(x, dist.group.WORLD), run(x, dist.group.WORLD))
    assert counters["stats"]["unique_graphs"] == 2
    alone = [dist.new_group([0]), dist.new_group([1])][rank()]
    assert not compare_values("result", program(x, alone), run(x, alone))


@on_ranks(2)
def test_work_that_leaves_the_graph():
    def program(x):
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        return y, work

    torch._dynamo.reset()
    y, work = torch.compile(program, backend="dtensor_aten", fullgraph=True)(torch.ones(2))
    assert work.wait() and work.is_completed() and y.tolist() == [4.0, 4.0]


@on_ranks(2)
def test_objects_break_the_graph_once_and_say_why():
    def program(x):
        y = x * 2
        found = [None] * size()
        dist.all_gather_object(found, {"rank": rank()})
        return y * (found[1]["rank"] + 1)

    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(program, backend="dtensor_aten")
    assert not compare_values("result", program(torch.ones(2)), run(torch.ones(2)))
    assert sum(counters["graph_break"].values()) == 1
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="does not trace this call of .*all_gather_object. It sends Python objects"
    ):
        torch.compile(program, backend="dtensor_aten", fullgraph=True)(torch.ones(2))


@on_ranks(2)
def test_errors_are_eagers():
    def two_sources(x):
        dist.broadcast(x, src=0, group_src=0)

    def other_dtype(x):
        dist.all_gather([torch.empty(4, 2, dtype=torch.float64)] * 2, x)

    def no_list_on_the_destination(x):
        dist.gather(x, None, dst=rank())

    def message_to_itself(x):
        dist.send(x, rank())

    for program in (two_sources, other_dtype, no_list_on_the_destination, message_to_itself):
        texts = []
        for run in (program, torch.compile(program, backend="dtensor_aten")):
            torch._dynamo.reset()
            with pytest.raises(ValueError) as raised:
                run(torch.ones(4, 2))
            texts.append(str(raised.value).split("\n")[0])
        assert texts[0] == texts[1]


@on_ranks(2)
def test_ranks_that_disagree_about_a_local_tensor_raise():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=True).to_local() * 2

    torch._dynamo.reset()
    with pytest.raises(ValueError, match="Inconsistent tensor metadata"):
        torch.compile(program, backend="dtensor_aten", fullgraph=True)(torch.ones(2 + rank(), 2))
    x = torch.ones(2, 2)
    assert not compare_values("result", program(x), torch.compile(program, backend="dtensor_aten", fullgraph=True)(x))


@on_ranks(2)
def test_sizes_that_were_gathered_are_not_those_of_the_empty_list():
    def program(x):
        n = torch.tensor([x.shape[0]])
        found = [torch.zeros_like(n) for _ in range(size())]
        dist.all_gather(found, n)
        return x * int(torch.stack(found).max().item())

    torch._dynamo.reset()
    run = torch.compile(program, backend="dtensor_aten")
    x = torch.ones(2 + rank(), 2)
    assert not compare_values("result", program(x), run(x))
    counters.clear()
    assert not compare_values("result", program(x), run(x))


@on_ranks(2)
def test_gradient_of_a_maximum_that_came_from_another_rank():
    def program(x):
        largest = x.max()
        dist.all_reduce(largest, op=MAX)
        return (x - largest).exp()

    check(program)
