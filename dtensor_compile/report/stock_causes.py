"""Causes of graph breaks in torch itself, identified by Dynamo's messages.

The rows continue `dtensor_compile.causes`, which has the breaks of this backend. `classify` finds the row of any break.
A break that no row matches is `UNKNOWN`; then only Dynamo's message is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dtensor_compile.causes import CAUSES, Cause, code_in

#: Backends that break: every one; stock ones only, because this one traces the code; this one only.
Under = Literal["every backend", "stock", "dtensor"]


@dataclass(frozen=True)
class Sign:
    """Patterns that identify a break.

    Attributes:
        kind: matches all of Dynamo's name for the break, or of the class of the error.
        says: matches a part of the message.
        frames: matches a part of the files of the stack.
    """

    kind: str = ".*"
    says: str = ""
    frames: str = ""

    def fits(self, kind: str, message: str, files: str) -> bool:
        """Whether a break matches; arguments as those of `classify`."""
        return bool(re.fullmatch(self.kind, kind) and re.search(self.says, message) and re.search(self.frames, files))


@dataclass(frozen=True)
class StockCause(Cause):
    """A cause that is identified by Dynamo's messages.

    Attributes:
        signs: any of them identifies this cause.
        under: backends that break.
    """

    signs: tuple[Sign, ...] = ()
    under: Under = "every backend"

    def fits(self, kind: str, message: str, files: str) -> bool:
        """Whether a break is of this cause; arguments as those of `classify`."""
        return any(sign.fits(kind, message, files) for sign in self.signs)


_SKIPPED = "Attempted to (call|inline) function marked as skipped"

# In order: the first match is the cause.
_ALL = (
    StockCause(
        "optimizer-step",
        "step of an optimizer",
        "torch breaks there on purpose, so that each optimizer is a graph of its own.",
        "Use backend='dtensor', which traces steps of optimizers, or compile the step by itself.",
        "optimizer.step()\n# instead: call it outside of the compiled function, or use backend='dtensor'",
        signs=(Sign(kind=r"Call to `torch\._dynamo\.graph_break\(\)`", frames=r"torch/optim/"),),
        under="stock",
    ),
    StockCause(
        "break-asked-for",
        "torch._dynamo.graph_break()",
        "The program asks for a break there.",
        "Take the call out.",
        "torch._dynamo.graph_break()\n# instead: nothing",
        signs=(Sign(kind=r"Call to `torch\._dynamo\.graph_break\(\)`"),),
    ),
    StockCause(
        "data-parallel-wrapper",
        "data-parallel wrapper inside the compiled function",
        "The wrapper (DDP, replicate, fully_shard) runs hooks that torch keeps out of graphs.",
        "Use backend='dtensor', which traces what the hooks do, or compile the blocks inside the wrapper "
        "(fully_shard(torch.compile(block))).",
        "replicated(x)  # DistributedDataParallel(layer)\n# instead: compile the module, then wrap it, or use "
        "backend='dtensor'",
        signs=(
            Sign(says=r"Logger\) set_runtime_stats|\(Reducer\)|_ReplicateState|DistributedDataParallel|reducer"),
            Sign(frames=r"torch/distributed/(_composable|fsdp)/|torch/nn/parallel/distributed\.py"),
        ),
        under="stock",
    ),
    StockCause(
        "disabled-function",
        "function that is kept out of graphs",
        "torch.compiler.disable marks it, in the program or inside torch.",
        "Remove the mark, or call it outside of the compiled function.",
        "torch.compiler.disable(torch.sin)(x)\n# instead\ntorch.sin(x)",
        signs=(
            Sign(kind=r"Skip (calling|inlining) `torch\.compiler\.disable\(\)`d function"),
            Sign(kind=_SKIPPED, says=r"module: torch\._dynamo\.decorators, qualname: disable"),
            Sign(says=r"_disable_dynamo"),
        ),
    ),
    StockCause(
        "handle-of-collective",
        "collective with async_op=True",
        "Its handle is a C++ object, which a graph of stock torch cannot contain.",
        "Use backend='dtensor', which traces it, or torch.distributed._functional_collectives.",
        "work = dist.all_reduce(x, async_op=True)\nwork.wait()\n# instead\ndist.all_reduce(x)",
        signs=(
            Sign(kind=r"async_op=True for distributed collectives"),
            Sign(kind=r"Unsupported method call", says=r"UserDefinedObjectVariable\(\w*Work\)"),
        ),
        under="stock",
    ),
    StockCause(
        "point-to-point",
        "message from one rank to another",
        "torch traces isend and irecv only if torch._dynamo.config.enable_p2p_compilation is set.",
        "Use backend='dtensor', which traces messages, or set that switch and use batch_isend_irecv.",
        "dist.isend(x, 0)\n# instead: backend='dtensor'",
        signs=(Sign(kind=r"P2P compilation disabled for .*"),),
        under="stock",
    ),
    StockCause(
        "differentiable-collective",
        "collective of torch.distributed.nn.functional",
        "torch refuses these functions while tracing.",
        "Use backend='dtensor', which traces them, or torch.distributed._functional_collectives.",
        "torch.distributed.nn.functional.all_gather(x)\n# instead: backend='dtensor'",
        signs=(Sign(says=r"torch\.distributed\.nn\.functional\.\w+ is not supported under torch\.compile"),),
        under="stock",
    ),
    StockCause(
        "collective-in-c++",
        "collective, or other function of c10d, without a traceable form in torch",
        "It fills in a C++ structure (broadcast, gather, reduce, scatter, barrier, new_group), and Dynamo cannot "
        "create one.",
        "Use backend='dtensor', which traces collectives, or call it outside of the compiled function.",
        "dist.broadcast(x, 0)\n# instead: backend='dtensor'",
        signs=(
            Sign(kind=_SKIPPED, says=r"pybind11_object\.__new__|pybind11_detail_function_record"),
            Sign(kind=r"Unsupported method call", says=r"`__new__` of class `pybind11_type`"),
        ),
        under="stock",
    ),
    StockCause(
        "spec-of-dtensor",
        "a DTensor is made from parts",
        "A DTensor or its spec is created in Python, and Dynamo has no node for that.",
        "Use backend='dtensor', which traces distribute_tensor and the factories, or DTensor.from_local.",
        "distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)\n# instead\nDTensor.from_local(x, mesh, "
        "[Shard(0)])",
        signs=(
            Sign(kind=r"Failed to convert args/kwargs to proxy", says=r"DTensorSpec"),
            Sign(kind=_SKIPPED, says=r"_DTensor_compute_global_tensor_info|DTensorSpec"),
            Sign(kind=r"missing_mp_subscript", says=r"subscripting 'type'"),
        ),
        under="stock",
    ),
    StockCause(
        "random-generator",
        "random numbers from a torch.Generator",
        "A generator is an object with a state of its own, which a graph cannot contain.",
        "Seed the default generator with torch.manual_seed, or draw the numbers outside of the compiled function.",
        "torch.rand(4, generator=generator)\n# instead\ntorch.rand(4)",
        signs=(Sign(says=r"\(Generator\)|torch\.Generator|manual_seed"),),
    ),
    StockCause(
        "warning",
        "warning",
        "warnings.warn is C code that Dynamo does not call.",
        "Use backend='dtensor', which defers warnings until the graph has run, or warn outside of the compiled "
        "function.",
        "warnings.warn('it is ' + str(mesh))\n# instead: backend='dtensor'",
        signs=(Sign(kind=_SKIPPED, says=r"module: _?warnings, qualname: warn"),),
        under="stock",
    ),
    StockCause(
        "printing",
        "print or logging",
        "The message is text of values that exist only when the graph has run.",
        "Use backend='dtensor', which defers it until then, or print outside of the compiled function.",
        "print(mesh)\n# instead: backend='dtensor'",
        signs=(
            Sign(kind=r"Failed to trace builtin operator", says=r"builtin print"),
            Sign(kind=r"logging\.Logger method not supported for non-export cases"),
        ),
        under="stock",
    ),
    StockCause(
        "value-of-data",
        "Python needs a data-dependent value",
        "item(), tolist(), bool() or a branch on a tensor: the value is only known at run time.",
        "Keep the value a tensor (torch.where for a branch), or return it and use it outside.",
        "if x.sum() > 0:\n    x = x + 1\n# instead\nx = torch.where(x.sum() > 0, x + 1, x)",
        signs=(
            Sign(kind=r"Data dependent operator|Data-dependent .*|Could not guard on data-dependent expression.*"),
            Sign(kind=r"Unsupported Tensor\.(item|tolist).*"),
            Sign(says=r"from data-dependent expression|guard on data-dependent expression"),
        ),
    ),
    StockCause(
        "size-of-data",
        "operator with a data-dependent output size",
        "The size of its result is only known at run time (nonzero, unique, bincount, a mask as index).",
        "Use a form of fixed size (torch.where with three arguments, minlength), or call it outside.",
        "torch.nonzero(x)\n# instead\ntorch.where(x != 0, x, 0)",
        signs=(Sign(kind=r"Dynamic shape operator.*|Dynamic slicing.*"),),
    ),
    StockCause(
        "autograd-inside",
        "backward pass inside the compiled function",
        "Dynamo leaves backward() and torch.autograd.grad to Python.",
        "Use backend='dtensor', which traces them, or call backward() on the result of the compiled function.",
        "torch.autograd.grad(weight.sin().sum(), [weight])\n# instead: backend='dtensor'",
        signs=(
            Sign(kind=r"Unsupported Tensor\.backward\(\) call|using `torch\.autograd\.grad` .*|.*autograd\.grad.*"),
        ),
        under="stock",
    ),
    StockCause(
        "parameter-made",
        "a parameter is created in the compiled function",
        "A parameter outlives the call, and Dynamo does not create one.",
        "Create parameters outside of the compiled function.",
        "torch.nn.Parameter(d * 2)\n# instead: outside of the compiled function",
        signs=(Sign(kind=r".*`torch\.nn\.Parameter\(\)`.*"),),
    ),
    StockCause(
        "leaf-returned",
        "a tensor that was set to require gradients is returned",
        "Its gradient would have to outlive the call.",
        "Call requires_grad_() outside of the compiled function.",
        "return x.detach().requires_grad_()\n# instead: outside of the compiled function",
        signs=(Sign(kind=r"requires_grad_\(\) intermediate leaked as output|.*requires_grad_.*"),),
    ),
    StockCause(
        "module-backward-hook",
        "backward hook of a module",
        "torch traces backward hooks of modules under compiled autograd only.",
        "Hook a tensor instead (output.register_hook), or compile the module without the hook.",
        "hooked(x)\n# instead: output.register_hook",
        signs=(Sign(kind=r"Module-level backwards hooks require compiled autograd\.?"),),
    ),
    StockCause(
        "attribute-of-class",
        "an attribute of a class is set",
        "It changes the class for everyone, and Dynamo only tracks changes of objects.",
        "Set it outside of the compiled function.",
        "torch.nn.Linear.scale = 1\n# instead: outside of the compiled function",
        signs=(Sign(kind=r"setattr\(\) on unsupported type"),),
    ),
    StockCause(
        "data-attribute",
        "x.data is set",
        "It gives a tensor other memory, which does not exist while tracing.",
        "Copy the values instead (x.copy_(y)).",
        "d.data = d * 2\n# instead\nd.copy_(d * 2)",
        signs=(
            Sign(
                kind=r"NotImplementedError/UnsupportedFakeTensorException when running FX node",
                says=r"method 'set_'|aten\.shallow_copy_data_",
            ),
        ),
    ),
    StockCause(
        "no-sharding-rule",
        "operator without a sharding rule",
        "DTensor cannot infer the placements of the result; eager raises too.",
        "Use backend='dtensor', which runs it on replicated tensors, or register_sharding, or to_local() around it.",
        "torch.cdist(d, d)\n# instead\ntorch.cdist(d.full_tensor(), d.full_tensor())",
        signs=(Sign(says=r"does not have a sharding strategy registered"),),
        under="stock",
    ),
    StockCause(
        "mixed-tensors",
        "operator over a DTensor and a plain tensor",
        "DTensor does not guess the placements of the plain tensor; eager raises too.",
        "Make it a DTensor: DTensor.from_local(t, mesh, [Replicate()]).",
        "d + torch.ones(8, 4)\n# instead\nd + DTensor.from_local(torch.ones(8, 4), mesh, [Replicate()])",
        signs=(Sign(says=r"got mixed torch\.Tensor and DTensor"),),
    ),
    StockCause(
        "result-not-a-tensor",
        "an operator returns something other than tensors",
        "A graph can pass on only tensors and numbers.",
        "Call it outside of the compiled function.",
        "torch.get_rng_state().storage()\n# instead: outside of the compiled function",
        signs=(
            Sign(
                kind=r"torch\.\* op returned non-Tensor|Unsupported method call|Failed to convert args/kwargs to proxy"
            ),
        ),
    ),
    StockCause(
        "recompile-limit",
        "compiled too often",
        "The function was compiled for so many different inputs that torch gives up and runs it in eager.",
        "See the recompiles of this report: mark a size as dynamic, or pass changing values as a tensor.",
        "# a size that changes at every call, with dynamic=False\n# instead: torch.compile(..., dynamic=True)",
        signs=(Sign(kind=r"Dynamo recompile limit exceeded.*|RecompileLimitExceeded|FailOnRecompileLimitHit"),),
    ),
    StockCause(
        "member-not-registered",
        "member of a mesh, group or placement that torch does not trace",
        "torch keeps a list of members that may be used while tracing, and ends the compilation at any other.",
        "Use backend='dtensor', which traces them, or read it outside of the compiled function.",
        "mesh.get_all_groups()\n# instead: backend='dtensor'",
        signs=(
            Sign(says=r"OpaqueObject|Opaque object|UnsafeScriptObjectError"),
            Sign(says=r"cls_source must not be None for MRO walk"),
        ),
        under="stock",
    ),
    StockCause(
        "exception",
        "an exception leaves the compiled function",
        "The program raises here, and nothing in the compiled function catches it.",
        "Catch it inside, or fix what raises.",
        "raise ValueError('no')\n# instead: nothing",
        signs=(Sign(kind=r"Observed exception|ObservedException|UncapturedHigherOrderOpError"),),
    ),
    StockCause(
        "c-function",
        "function of C code",
        "Dynamo traces Python code only.",
        "Call it outside of the compiled function, or make it an operator (torch.library.custom_op).",
        "x = x + zlib.crc32(b'x')\n# instead: outside of the compiled function",
        signs=(Sign(kind=_SKIPPED, says=r"C extension|builtin"),),
    ),
    StockCause(
        "skipped-function",
        "function of a module that torch does not trace",
        "torch keeps a list of modules that it leaves to Python.",
        "Call it outside of the compiled function.",
        "torch.amp.GradScaler('cpu').scale(x)\n# instead: outside of the compiled function",
        signs=(Sign(kind=_SKIPPED),),
    ),
    StockCause(
        "error-in-compiler",
        "the compiler fails",
        "An error inside torch or the backend ended the compilation.",
        "Read the message; options={'capture': False} shows whether it comes from this backend.",
        "# any error that torch.compile raises and eager does not",
        signs=(Sign(kind=r"BackendCompilerFailed|InternalTorchDynamoError|TorchRuntimeError|\w*Error"),),
    ),
)

UNKNOWN = StockCause(
    "unknown",
    "a break that the catalogue does not know",
    "Only Dynamo's message is known.",
    "Follow Dynamo's hints, and report it to us: the catalogue should have it.",
    "# none",
)

#: Code -> cause, of torch's own breaks.
STOCK_CAUSES: Mapping[str, StockCause] = {cause.code: cause for cause in (*_ALL, UNKNOWN)}

#: Dynamo's text between a break and one that follows because it cannot break there.
_HANDLING = "*** While handling this graph break, another graph break occurred: ***"

#: Causes of ours for which other backends do not break.
_OURS_ALONE = frozenset({"symbolic-spec"})


def classify(kind: str, message: str, files: str = "") -> Cause:
    """The cause of a break.

    Args:
        kind: Dynamo's name for the break (its ``gb_type``), or the class of the error.
        message: Dynamo's full message.
        files: files of the stack, one per line.
    """
    code = code_in(message)
    if code is not None:
        return CAUSES[code]
    first, handling, _ = message.partition(_HANDLING)
    if handling:  # the kind of the first break is only in the message; it is the one that the program can avoid
        cause = classify(first.strip().partition("\n")[0], first, files)
        if cause is not UNKNOWN:
            return cause
    return next((cause for cause in _ALL if cause.fits(kind, message, files)), UNKNOWN)


def breaks_under(cause: Cause) -> Under:
    """The backends that break for that cause."""
    if isinstance(cause, StockCause):
        return cause.under
    return "dtensor" if cause.code in _OURS_ALONE else "every backend"
