"""Data-parallel wrappers inside a compiled region: eager's numbers, gradients and module state, in one graph."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import dtensor_compile
from dtensor_compile.causes import code_in
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.release import minor_release
from dtensor_compile.recording.recorder import watch_graphs
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from dtensor_compile.topology.links import CLUSTERS, Cluster, Link
from tests.cases import mostly_slow

BACKEND = "dtensor_aten"
#: 7 and 13 do not divide evenly over 2 or 4 ranks; the bias of 3 leaves one of 4 ranks without a shard.
SIZES = (7, 13, 3)


class MLP(nn.Module):
    def __init__(self, sizes=SIZES):
        super().__init__()
        self.up, self.down = nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2])

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, n=2, dim=6):
        super().__init__()
        self.blocks = nn.ModuleList(MLP((dim, 2 * dim, dim)) for _ in range(n))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = x + block(x) * scale
        return self.norm(x)


def dp_mesh():
    return make_mesh((dist.get_world_size(),), ("dp",))


def nested(**kwargs):
    model = MLP()
    fully_shard(model.up, mesh=dp_mesh(), **kwargs)
    return fully_shard(model, mesh=dp_mesh(), **kwargs)


def per_block(mesh=None, **kwargs):
    model, mesh = Blocks(), mesh if mesh is not None else dp_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def local_input(width, step=0, batch=4):
    """Different on every rank and in every step."""
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(batch, width, requires_grad=True)


def run(build, call, steps, width, wrap=None, loss=lambda out: out.float().exp().mean()):
    """Outputs, gradients and state of `steps` steps, whose gradients accumulate; `wrap` compiles what is called."""
    torch.manual_seed(0)
    counters.reset()
    model = build()
    f = call(model)
    g = wrap(f) if wrap else f
    seen = []
    for step in range(steps):
        x = local_input(width, step)
        out = g(x)
        loss(out).backward()
        seen.append(
            (
                out.detach(),
                x.grad,
                {name: p.grad.clone() if p.grad is not None else None for name, p in model.named_parameters()},
                {name: b.clone() for name, b in model.named_buffers()},
            )
        )
    return seen


def compiled(f, **kwargs):
    return torch.compile(f, backend=BACKEND, fullgraph=True, **kwargs)


def assert_same(
    build, call=lambda model: lambda x: model(x), steps=3, width=SIZES[0], computed_in=None, wrap=compiled, **kwargs
):
    eager = run(build, call, steps, width, **kwargs)
    ours = run(build, call, steps, width, wrap, **kwargs)
    for step, (a, b) in enumerate(zip(eager, ours)):
        differences = compare_values(f"step {step}", a, b, computed_in)
        assert not differences, "\n".join(map(str, differences))


# ---- fully_shard ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", mostly_slow([True, False], False))
@on_ranks(2)
def test_nested_uneven(reshard):
    assert_same(lambda: nested(reshard_after_forward=reshard))


@on_ranks(4)
def test_nested_uneven_and_empty_shards():
    assert_same(nested, steps=2)


@pytest.mark.slow
@on_ranks(4)
def test_reshard_to_fewer_ranks():
    assert_same(lambda: per_block(reshard_after_forward=2), width=6, steps=2)


@on_ranks(2)
def test_module_itself_compiled():
    assert_same(per_block, call=lambda model: model, width=6)


@on_ranks(2)
def test_gradients_are_sharded_and_the_module_stays_sharded():
    counters.reset()
    model = nested()
    before = {name: p for name, p in model.named_parameters()}
    f = compiled(lambda x: model(x))
    f(local_input(SIZES[0])).sum().backward()
    for name, p in model.named_parameters():
        assert p is before[name] and isinstance(p, DTensor) and p.placements == (Shard(0),)
        assert (
            isinstance(p.grad, DTensor)
            and p.grad.placements == (Shard(0),)
            and p.grad.to_local().shape == p.to_local().shape
        )
    assert all(isinstance(v, DTensor) for v in model.state_dict().values())


@pytest.mark.slow
@on_ranks(2)
def test_second_call_does_not_recompile_and_new_batch_once():
    counters.reset()
    model = nested()
    f = compiled(lambda x: model(x))
    counts = []
    for batch in (4, 4, 5, 6):
        f(local_input(SIZES[0], batch=batch)).sum().backward()
        counts.append(counters.graphs())
    assert counts[1] == counts[0] and counts[3] - counts[1] == 1


@on_ranks(2)
def test_mixed_precision():
    def build():
        model, policy = Blocks(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model.blocks[0], mesh=dp_mesh(), mp_policy=policy)
        return fully_shard(model, mesh=dp_mesh(), mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))

    assert_same(build, width=6, computed_in=torch.bfloat16)


@on_ranks(2)
def test_gradients_are_reduced_in_eagers_dtype_if_the_policy_names_none():
    def gradient(backend):
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=dp_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        call = model if backend is None else torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
        call(torch.full((1, 4), 2.0 ** (-9 * dist.get_rank()))).sum().backward()
        return model.weight.grad.full_tensor()

    assert torch.equal(gradient(BACKEND), gradient(None))  # one bit more than bfloat16 has, as of 2.15


@pytest.mark.slow
@on_ranks(2)
def test_mixed_precision_reduced_in_half():
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    assert_same(lambda: per_block(mp_policy=policy), width=6, computed_in=torch.float16)


@on_ranks(2)
def test_inputs_in_containers_are_cast():
    def build():
        class Model(MLP):
            def forward(self, batch, *, scale):
                return {"out": super().forward(batch["x"]) * scale[0]}

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        return fully_shard(Model(), mesh=dp_mesh(), mp_policy=policy)

    def call(model):
        return lambda x: model({"x": x, "names": ["a"]}, scale=(torch.full((1,), 2.0), 3))["out"]

    assert_same(build, call, computed_in=torch.bfloat16)


@pytest.mark.slow
@on_ranks(4)
def test_hsdp():
    assert_same(lambda: per_block(mesh=make_mesh((2, 2), ("replicate", "shard"))), width=6)


@pytest.mark.slow
@on_ranks(4)
def test_with_tensor_parallel():
    def build():
        mesh = make_mesh((2, 2), ("dp", "tp"))
        model = Blocks()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def same_on_tp_ranks(model):
        return lambda x: model(torch.cos(torch.arange(24.0) * (1 + dist.get_rank() // 2)).view(4, 6) + x * 0)

    assert_same(build, same_on_tp_ranks, width=6)


@on_ranks(2)
def test_sharded_along_another_dim():
    def build():
        model = MLP((6, 8, 4))
        return fully_shard(model, mesh=dp_mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)

    assert_same(build, width=6)


@pytest.mark.slow
@on_ranks(2)
def test_modules_in_one_group():
    def build():
        model = Blocks()
        fully_shard([model.blocks[0], model.norm], mesh=dp_mesh())
        return fully_shard(model, mesh=dp_mesh())

    assert_same(build, width=6)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


@pytest.mark.slow
@pytest.mark.skipif(minor_release(torch.__version__) == "2.11", reason="Dynamo of 2.11 does not inline them")
@on_ranks(2)
def test_blocks_that_torch_compile_wrapped_before():
    """Names of parameters, and attributes, are those of the wrapper; in the region it is not compiled by itself."""

    def build():
        model = Blocks(3)
        for i, block in enumerate(model.blocks):
            block.factor = 0.5
            model.blocks[i] = fully_shard(torch.compile(block, backend="eager"), mesh=dp_mesh())
        return fully_shard(model, mesh=dp_mesh())

    def call(model):
        def step(x):
            return model(x) * model.blocks[1].factor

        return step

    assert_same(build, call, width=6, steps=2)
    assert_same(build, width=6)


@on_ranks(2)
def test_tied_and_frozen_parameters():
    def build():
        model = Tied()
        model.second.bias.requires_grad_(False)
        return fully_shard(model, mesh=dp_mesh())

    assert_same(build, width=6)


@on_ranks(2)
def test_parameters_of_one_call_that_are_unused_or_frozen():
    """They are gathered and reduced by one operator with the others, and keep no gradient."""

    class Model(MLP):
        def __init__(self):
            super().__init__((6, 6, 6))
            self.unused = torch.nn.Linear(6, 6)

    def build():
        model = Model()
        model.up.weight.requires_grad_(False)
        return fully_shard(model, mesh=dp_mesh())

    assert_same(build, width=6, steps=2)


@on_ranks(2)
def test_one_module_called_twice():
    class Model(MLP):
        def forward(self, x):
            return self.up(super().forward(self.up(x)))

    def build():
        model = Model((6, 6, 6))
        fully_shard(model.up, mesh=dp_mesh())
        return fully_shard(model, mesh=dp_mesh())

    assert_same(build, lambda model: lambda x: model(x) + model(x), width=6)


@on_ranks(2)
def test_checkpointed_blocks():
    class Model(Blocks):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.norm(x)

    def build():
        model = Model()
        for block in model.blocks:
            fully_shard(block, mesh=dp_mesh())
        return fully_shard(model, mesh=dp_mesh())

    assert_same(build, width=6)


@on_ranks(2)
def test_divisor_of_gradients():
    def build():
        model = nested()
        for module in (model.up, model):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
        return model

    assert_same(build)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_and_eager_calls_mix():
    def mixed(model):
        f = compiled(lambda x: model(x)) if MIX else lambda x: model(x)
        count = [0]

        def call(x):
            count[0] += 1
            if count[0] == 2:
                return model(x)
            with torch.no_grad():
                kept = f(x) if count[0] == 3 else model(x)
            return f(x) + kept

        return call

    MIX = False
    eager = run(lambda: per_block(reshard_after_forward=False), mixed, 4, 6)
    MIX = True
    ours = run(lambda: per_block(reshard_after_forward=False), mixed, 4, 6)
    for a, b in zip(eager, ours):
        assert not compare_values("step", a, b)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_parameters_that_the_program_gathered(async_op):
    def call(model):
        g = compiled(lambda x: model(x)) if COMPILE else model

        def f(x):
            handle = model.unshard(async_op=async_op)
            if async_op and x[0, 0] > 0:
                handle.wait()
            return g(x)

        return f

    COMPILE = False
    eager = run(nested, call, 3, SIZES[0])
    COMPILE = True
    ours = run(nested, call, 3, SIZES[0])
    assert counters.graphs() <= 2
    for a, b in zip(eager, ours):
        assert not compare_values("step", a, b)


@on_ranks(2)
def test_compiled_backward_of_eager_forward_and_the_reverse():
    for order in ("eager first", "compiled first"):
        counters.reset()
        torch.manual_seed(0)
        model = nested()
        f = compiled(lambda x: model(x))
        x, y = local_input(SIZES[0], 0), local_input(SIZES[0], 1)
        first, second = (model, f) if order == "eager first" else (f, model)
        a = first(x)
        b = second(y)
        a.sum().backward()
        b.sum().backward()
        got = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        model(y).sum().backward()
        for g, p in zip(got, model.parameters()):
            torch.testing.assert_close(g, p.grad.full_tensor())


def train_step(model, optimizer, inside):
    def step(x):
        loss = model(x).square().mean()
        if inside:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("wrap", mostly_slow(["fsdp", "ddp"], "ddp"))
@on_ranks(2)
def test_whole_train_step(wrap):
    losses, models = [], []
    for compile_it in (False, True):
        counters.reset()
        torch.manual_seed(0)
        model = per_block() if wrap == "fsdp" else DDP(Blocks())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = train_step(model, optimizer, True)
        g = compiled(step) if compile_it else step
        losses.append([g(local_input(6, i)).item() for i in range(4)])
        models.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(*models):
        torch.testing.assert_close(*(p.full_tensor() if wrap == "fsdp" else p for p in (a, b)), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_clipping_and_optimizer_outside():
    results = []
    for compile_it in (False, True):
        counters.reset()
        torch.manual_seed(0)
        model = per_block()
        f = compiled(lambda x: model(x)) if compile_it else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for i in range(3):
            f(local_input(6, i)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append([norm.full_tensor(), *(p.detach() for p in model.parameters())])
    assert not compare_values("parameters", *results)


@pytest.mark.slow
@on_ranks(2)
def test_gradients_left_unreduced_run_in_eager():
    def call(model):
        count = [0]

        def f(x):
            count[0] += 1
            model.set_requires_gradient_sync(count[0] % 2 == 0)
            return g(x)

        g = torch.compile(lambda x: model(x), backend=BACKEND) if COMPILE else lambda x: model(x)
        return f

    COMPILE = False
    eager = run(per_block, call, 5, 6)
    COMPILE = True
    ours = run(per_block, call, 5, 6)
    for a, b in zip(eager, ours):
        assert not compare_values("step", a, b)


@on_ranks(2)
def test_a_setting_without_meaning_in_a_graph_has_a_cause():
    counters.reset()
    model = fully_shard(MLP(), mesh=dp_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(lambda x: model(x))(local_input(SIZES[0]))
    assert code_in(str(error.value)) == "data-parallel-setting" and "offloaded" in str(error.value)


@on_ranks(2)
def test_compiled_autograd():
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert_same(nested, steps=2)


@on_ranks(2)
def test_replicate_built_on_fully_shard():
    assert_same(lambda: replicate_with_fsdp(MLP(), mesh=make_mesh((2,), ("replicate",))))


# ---- DDP and replicate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_ddp(kwargs):
    assert_same(lambda: DDP(MLP(), **kwargs))
    assert_same(lambda: DDP(MLP(), **kwargs), call=lambda model: model)


@on_ranks(4)
def test_ddp_on_four_ranks():
    assert_same(lambda: DDP(MLP()))


@on_ranks(2)
def test_ddp_sends_buffers_of_the_first_rank():
    def build():
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        return DDP(model)

    assert_same(build, width=6)


@pytest.mark.parametrize("wrap", [DDP, replicate])
@on_ranks(2)
def test_no_sync_then_sync_accumulates_as_eager(wrap):
    def call(model):
        count = [0]

        def f(x):
            count[0] += 1
            return (quiet if count[0] % 3 else loud)(x)

        def without(x):
            if isinstance(model, DDP):
                with model.no_sync():
                    return model(x)
            return model(x)

        maybe = compiled if COMPILE else lambda f: f
        inner, outer = maybe(without), maybe(lambda x: model(x))

        def quiet(x):
            if not isinstance(model, DDP):
                model.set_requires_gradient_sync(False)
            return inner(x)

        def loud(x):
            if not isinstance(model, DDP):
                model.set_requires_gradient_sync(True)
            return outer(x)

        return f

    COMPILE = False
    eager = run(lambda: wrap(MLP()), call, 7, SIZES[0])
    COMPILE = True
    ours = run(lambda: wrap(MLP()), call, 7, SIZES[0])
    for a, b in zip(eager, ours):
        assert not compare_values("step", a, b)


@on_ranks(2)
def test_one_backward_of_a_quiet_and_a_loud_forward():
    results = []
    for compile_it in (False, True):
        counters.reset()
        torch.manual_seed(0)
        model = DDP(MLP())
        f = compiled(lambda x: model(x)) if compile_it else model
        with model.no_sync():
            a = f(local_input(SIZES[0], 0))
        b = f(local_input(SIZES[0], 1))
        (a.sum() + b.sum()).backward()
        results.append([p.grad for p in model.parameters()])
    assert not compare_values("gradients", *results)


@on_ranks(2)
def test_communication_hook():
    def build():
        model = DDP(MLP())
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    assert_same(build)


@on_ranks(2)
def test_hooks_of_parameters_see_what_they_see_in_eager():
    def ddp():
        model = DDP(MLP())
        for p in model.parameters():
            p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return model

    assert_same(ddp)

    def fsdp():
        model = nested()
        model.up.weight.register_hook(lambda grad: grad * 0)
        return model

    assert_same(fsdp, wrap=lambda f: torch.compile(f, backend=BACKEND))


@on_ranks(2)
def test_averages_in_the_backward_are_recorded():
    counters.reset()
    model = DDP(MLP())
    with dtensor_compile.record() as recording:
        compiled(lambda x: model(x))(local_input(SIZES[0])).sum().backward()
    assert [(c.kind, c.bytes) for c in recording.collectives] == [
        ("all_reduce", 4 * sum(p.numel() for p in model.parameters()))
    ]


@on_ranks(2)
def test_unused_parameters_run_in_eager():
    class Model(MLP):
        def forward(self, x):
            return self.up(x)

    def build():
        return DDP(Model(), find_unused_parameters=True)

    assert_same(build, wrap=lambda f: torch.compile(f, backend=BACKEND))


@on_ranks(2)
def test_reducer_and_backward_inside_the_region_break():
    counters.reset()
    model = DDP(MLP())
    model.register_comm_hook(None, fp16_compress_hook)

    def step(x):
        model(x).sum().backward()

    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(step)(local_input(SIZES[0]))
    assert code_in(str(error.value)) == "data-parallel-setting"


@pytest.mark.slow
@on_ranks(2)
def test_accumulation_in_one_region_is_right_in_pieces():
    def build():
        return DDP(MLP())

    def call(model):
        def step(x):
            with model.no_sync():
                model(x).square().sum().backward()
            model(x * 2).square().sum().backward()
            return model(x)

        return step

    assert_same(build, call, wrap=lambda f: torch.compile(f, backend=BACKEND))


@on_ranks(2)
def test_module_compiled_inside_of_ddp_is_one_graph():
    def build():
        return DDP(Blocks(3, 256), bucket_cap_mb=1)

    def call(model):
        if COMPILE:
            model.module.compile(backend=BACKEND)
        return model

    COMPILE = False
    eager = run(build, call, 2, 256)
    COMPILE = True
    ours = run(build, call, 2, 256)
    assert counters.graphs() == 1
    for a, b in zip(eager, ours):
        assert not compare_values("step", a, b)


@on_ranks(2)
def test_composable_replicate():
    assert_same(lambda: replicate(MLP()))
    assert_same(lambda: replicate(MLP()), call=lambda model: model)


@on_ranks(2)
def test_ddp_with_compiled_autograd():
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert_same(lambda: DDP(MLP()), steps=2)
        assert_same(lambda: DDP(nn.Sequential(MLP((6, 6, 6)), nn.BatchNorm1d(6))), steps=2, width=6)


# ---- what is sent --------------------------------------------------------------------------------------------------


def network(latency):
    """A network of 1 GB/s: what takes less than 8 latencies to send is merged, what takes more than 160 is split."""
    link = Link(latency, 1e9)
    return Cluster("for tests", 1, link, link, CLUSTERS["cpu-loopback"].device, backend="gloo")


#: On which a module of these tests is neither merged with others nor split.
AS_WRAPPED = network(2e-8)


def sent_by(build, width=6, topology=AS_WRAPPED, call=lambda model: lambda x: model(x)):
    """Kinds of the collectives of a forward and a backward pass, and the redistributions that the report calls
    removed.
    """
    counters.reset()
    torch.manual_seed(0)
    model = build()
    with dtensor_compile.record() as recording:
        compiled(call(model), options={"topology": topology})(local_input(width)).float().sum().backward()
    removed = [r for r in recording.report().ours.redistributions if r.fate == "removed"]
    return [c.kind for c in recording.collectives], removed


@pytest.mark.parametrize("reshard, gathers", mostly_slow([(True, 4), (False, 2)], (True, 4)))
@on_ranks(2)
def test_what_one_fully_shard_wraps_is_gathered_and_reduced_as_one(reshard, gathers):
    def build():
        model = Blocks()
        for block in model.blocks:
            fully_shard(block, mesh=dp_mesh(), reshard_after_forward=reshard)
        return model

    sent, removed = sent_by(build)
    assert sent.count("all_gather") == gathers and sent.count("all_to_all") == 2  # reductions, exchanged on gloo
    assert len(sent) == gathers + 2 and not removed


@pytest.mark.slow
@on_ranks(2)
def test_modules_wrapped_in_one_list_are_gathered_as_one():
    def build():
        model = Blocks()
        fully_shard(list(model.blocks), mesh=dp_mesh())
        return fully_shard(model, mesh=dp_mesh(), reshard_after_forward=False)

    sent, removed = sent_by(build)
    assert (
        sorted(sent) == ["all_gather"] * 3 + ["all_to_all"] * 2 and not removed
    )  # blocks twice; the norm is the root's
    assert_same(build, width=6)


@pytest.mark.slow
@on_ranks(2)
def test_a_module_that_is_called_twice_is_gathered_twice():
    def build():
        model = Blocks(n=1)
        fully_shard(model.blocks[0], mesh=dp_mesh(), reshard_after_forward=True)
        return model

    def twice(model):
        return lambda x: model(model(x))

    sent, _ = sent_by(build, call=twice)
    assert sent.count("all_gather") <= 4 and sent.count("all_to_all") <= 2
    assert_same(build, call=twice, width=6)


@pytest.mark.slow
@on_ranks(4)
def test_replicas_of_shards_reduce_as_one_over_each_mesh_dim():
    sent, _ = sent_by(lambda: per_block(make_mesh((2, 2), ("replicas", "shards"))))
    assert sent.count("all_reduce") == 3 and sent.count("all_to_all") == 3  # two blocks, and what is left to the root


@pytest.mark.parametrize("mebibytes, buckets", [(None, 2), (25, 1), (1, 2)])
@on_ranks(2)
def test_gradients_fill_the_buckets_of_ddp(mebibytes, buckets):
    """Weights of 1.6 MiB each; a bucket is full when it reaches its size, as for torch's reducer from the second step
    on.
    """
    sent, removed = sent_by(lambda: DDP(MLP((640, 640, 640)), bucket_cap_mb=mebibytes), 640, network(2e-5))
    assert sent == ["all_reduce"] * buckets and not removed


@on_ranks(2)
def test_gradients_of_two_dtypes_fill_buckets_of_their_own():
    class Mixed(MLP):
        def __init__(self):
            super().__init__((6, 6, 6))
            self.up.double()

        def forward(self, x):
            return self.down(self.up(x.double()).float())

    sent, _ = sent_by(lambda: DDP(Mixed()))
    assert sent == ["all_reduce"] * 2
    assert_same(lambda: DDP(Mixed()), width=6)


@on_ranks(2)
def test_buffers_of_ddp_are_sent_in_one_message_a_dtype():
    def build():
        return DDP(nn.Sequential(MLP((6, 6, 6)), nn.BatchNorm1d(6), nn.BatchNorm1d(6)))

    sent, _ = sent_by(build)
    assert sent == ["broadcast", "broadcast", "all_reduce"], sent
    assert_same(build, width=6)


@on_ranks(2)
def test_large_layers_of_a_root_are_gathered_when_they_are_used():
    """First and last layer belong to the root: what is used last is gathered behind what the blocks need."""

    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 400, bias=False), nn.Linear(400, 6, bias=False)
            self.block = nn.Linear(400, 400, bias=False)

        def forward(self, x):
            return self.last(F.gelu(self.block(F.gelu(self.first(x)))))

    def build():
        model = Ends()
        fully_shard(model.block, mesh=dp_mesh())
        return fully_shard(model, mesh=dp_mesh())

    shapes = []

    def watch(stage, graph):
        if stage == "lowered":
            shapes.append([list(n.meta["val"].shape) for n in graph.nodes if "all_gather_into_tensor" in str(n.target)])

    with watch_graphs(watch):
        sent, _ = sent_by(build)
    assert shapes[0] == [[400, 6], [400, 400], [6, 400]] and sent.count("all_gather") == 4
    assert_same(build, width=6)


@on_ranks(2)
def test_a_bucket_that_takes_much_longer_to_send_than_to_start_is_split():
    """Four tensors, of which the weights take 1.6 ms each, and a collective 4 us to start: one part each."""
    sent, removed = sent_by(lambda: DDP(MLP((640, 640, 640)), bucket_cap_mb=25), 640, network(2e-6))
    assert sent == ["all_reduce"] * 2 and not removed
    assert sent_by(lambda: DDP(MLP((640, 640, 640)), bucket_cap_mb=25), 640, network(1e-4))[0] == ["all_reduce"]
