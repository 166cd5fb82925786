"""Causes of graph breaks: one registry, with codes shared by messages, reports and docs.

Every graph break of our backend names its cause by code. The message to the user begins with the title and the code
(`break_title`), from which readers of messages find the row again (`code_in`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One reason why a program is not one graph.

    Attributes:
        code: short and stable name, lower case with hyphens.
        title: the construct, in a few words, independent of the program.
        why: the reason why it is not traced.
        instead: a form of the program that is traced, or a limitation to accept.
        example: lines of Python that break for this cause, and after ``# instead`` equivalent lines that do not.
    """

    code: str
    title: str
    why: str
    instead: str
    example: str


_ALL = (
    Cause(
        "member-not-traced",
        "member is not traced",
        "The member may change the object, or depends on more than the guards fix.",
        "Use the member outside of the compiled function and pass its result in.",
        "options = group._get_backend(x.device).options\n# instead: before the compiled function, and pass the result "
        "in",
    ),
    Cause(
        "object-state",
        "state of a mesh, a group or a placement is read or set",
        "Guards fix the object, and values read from it while tracing would not follow the change.",
        "Keep data of your own in an object of your own.",
        "mesh.scale = 2\n# instead: keep the scale next to the mesh",
    ),
    Cause(
        "mesh-entered-by-hand",
        "mesh is entered or left by an explicit call",
        "Between the two calls the mesh has to be the current one in Python, too.",
        "Use a with statement.",
        "mesh.__enter__()\ny = x @ x\nmesh.__exit__(None, None, None)\n# instead\nwith mesh:\n    y = x @ x",
    ),
    Cause(
        "not-a-tensor",
        "method of a DTensor that returns something other than tensors",
        "It returns Python objects that describe shards (for checkpoints and caches); a graph contains only tensors.",
        "Call it outside of the compiled function; placements, device_mesh and shape are constants inside.",
        "chunks = d.__create_chunk_list__()\n# instead: outside of the compiled function",
    ),
    Cause(
        "raw-object",
        "object of the C++ side of torch.distributed",
        "It acts on the process or on other ranks when its methods are called, and has no state that could be traced.",
        "Use it outside of the compiled function. Collectives of torch.distributed are traced, and so are those of "
        "groups without options objects.",
        "group.allreduce([x], dist.AllreduceOptions())\n# instead\ngroup.allreduce([x], dist.ReduceOp.SUM)",
    ),
    Cause(
        "group-lifetime",
        "process groups are started or ended",
        "Compiled code contains groups and is guarded on them; it cannot outlive the group that it runs in.",
        "Start and end process groups outside of the compiled function.",
        "dist.destroy_process_group()\n# instead: after the last call of the compiled function",
    ),
    Cause(
        "process-setting",
        "setting of the process is changed",
        "The setting changes the behaviour of code outside of the graph, at the moment at which it is changed.",
        "Change it outside of the compiled function.",
        "dist.set_debug_level(dist.DebugLevel.INFO)\n# instead: before the compiled function is called",
    ),
    Cause(
        "looks-at-execution",
        "tool that observes eager execution",
        "It shows eager execution call by call, and a compiled program does not execute these calls.",
        "Use it on the program in eager; dtensor_compile.record() shows what the compiled one sends.",
        "with CommDebugMode() as counts:\n    model(x)\n# instead\nwith dtensor_compile.record() as counts:\n    "
        "compiled(x)",
    ),
    Cause(
        "member-argument",
        "argument of a method is not a constant",
        "Methods of meshes, groups and placements are evaluated while tracing, and need the values of their arguments "
        "then.",
        "Compute the argument outside of the compiled function, or make it a constant.",
        "mesh.size(int(x.sum()))\n# instead\nmesh.size(0)",
    ),
    Cause(
        "maker-argument",
        "argument of a function that creates meshes or groups is not a constant",
        "Meshes and groups are created once, while tracing, which needs the values of the arguments.",
        "Create the mesh or the group outside of the compiled function and pass it in.",
        "dist.new_group([int(x.sum())])\n# instead: make the group outside and pass it in",
    ),
    Cause(
        "placement-argument",
        "argument of a placement is not a constant",
        "Placements are created while tracing, which needs the values of their arguments.",
        "Create the placement outside of the compiled function and pass it in.",
        "Shard(int(x.sum()))\n# instead\nShard(0)",
    ),
    Cause(
        "object-collective",
        "collective of Python objects",
        "It sends Python objects, which exist only at run time.",
        "Call it outside of the compiled function, or send tensors.",
        "dist.all_gather_object(results, value)\n# instead\ndist.all_gather_into_tensor(results, tensor)",
    ),
    Cause(
        "error-of-other-ranks",
        "call that ends with an error of other ranks",
        "It ends with an error that depends on the other ranks.",
        "Call it outside of the compiled function, or use dist.barrier().",
        "dist.monitored_barrier()\n# instead\ndist.barrier()",
    ),
    Cause(
        "receive-from-any",
        "message from any rank",
        "It receives from any rank, and which one is only known at run time.",
        "Name the source.",
        "dist.recv(x)\n# instead\ndist.recv(x, src=0)",
    ),
    Cause(
        "reduction-not-plain",
        "reduction that is not traced",
        "It is called with something other than a plain reduction.",
        "Scale the tensor and use dist.ReduceOp.SUM.",
        "dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))\n# instead\ndist.all_reduce(x.mul_(0.5))",
    ),
    Cause(
        "leaf-made",
        "a leaf is made in the program",
        "backend='dtensor' cannot give a tensor that it creates itself a gradient that outlives the call: if it "
        "leaves the compiled function, Python has to create it.",
        "Create parameters outside of the compiled function.",
        "return distribute_tensor(x.requires_grad_(), mesh, [Shard(0)])\n# instead: make the parameter outside and "
        "pass it in",
    ),
    Cause(
        "leaf-hooks",
        "backward pass inside the region, and a leaf with hooks",
        "Hooks of parameters and inputs are not part of a backward pass that is traced.",
        "Call backward() outside of the compiled function, or register the hooks on intermediate tensors.",
        "weight.register_hook(print)\n(x @ weight).sum().backward()\n# instead\ny = x @ weight\ny.register_hook(print)",
    ),
    Cause(
        "hook-not-traced",
        "backward hook is not traced",
        "A backward hook becomes part of the backward pass that is traced with the forward: it may compute with "
        "gradients and other tensors and return tensors or None, but not change Python objects or read numbers out of "
        "a tensor.",
        "Register the hook on the result of the compiled function, or leave the module that has it out of the compiled "
        "function.",
        "module.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out))\n"
        "# instead\nmodule.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))",
    ),
    Cause(
        "hook-strides",
        "backward hook depends on the strides of a gradient",
        "The strides of gradients are not known while the forward is traced.",
        "Call contiguous() on the gradient.",
        "if grad_out[0].is_contiguous(): ...\n# instead\ngrad = grad_out[0].contiguous()",
    ),
    Cause(
        "data-parallel-setting",
        "setting of a data-parallel wrapper",
        "The module is wrapped by fully_shard, replicate or DistributedDataParallel, with a setting that has no "
        "meaning in a graph. It runs in eager; what it wraps is compiled.",
        "Take the setting back, or accept the graph break.",
        "fully_shard(block, offload_policy=CPUOffloadPolicy())\n# instead\nfully_shard(block)",
    ),
    Cause(
        "comm-mode",
        "CommDebugMode is asked for information that it does not have here",
        "The mode counts collectives while the program is traced. It does not follow modules, does not know what was "
        "counted before the compiled function was called, and cannot determine what a redistribution to or from "
        "strided shards sends.",
        "Use get_comm_counts() and get_total_counts(), or enter the mode around the eager program.",
        "with CommDebugMode() as mode: ...\nmode.generate_comm_debug_tracing_table()\n# "
        "instead\nmode.get_comm_counts()",
    ),
    Cause(
        "generator-inner",
        "generator is used in a checkpointed region",
        "The operators of a checkpointed region run again in the backward, and the state of a generator cannot leave "
        "the region.",
        "Draw outside of the region and pass the values in.",
        "checkpoint(lambda x: x + torch.rand(4, generator=g), x)\n# instead\nnoise = torch.rand(4, generator=g)",
    ),
    Cause(
        "generator-of-device",
        "generator of a device other than the CPU",
        "The state of a generator is a value of the graph, and that of a device's generator follows rules of the "
        "device.",
        "Draw from torch's own generator of that device.",
        "torch.rand(4, device='cuda', generator=g)\n# instead\ntorch.rand(4, device='cuda')",
    ),
    Cause(
        "message-argument",
        "argument of print, logging or warnings is not a tensor or a constant",
        "Messages are printed after the graph has run; only tensors, constants, meshes, groups, placements, and lists "
        "of those can be deferred until then, outside of checkpointed regions.",
        "Print the parts that you need, or print outside of the compiled function.",
        "print(an_object_of_mine)\n# instead\nprint(an_object_of_mine.name)",
    ),
    Cause(
        "number-needed",
        "the value of a data-dependent number is needed",
        "item() and tolist() are part of the graph as symbolic numbers (unbacked SymInts); a loop over one, an index "
        "into a list or an operator that cannot do without the value needs it while tracing.",
        "Keep the number in tensor operations, or read it outside of the compiled function.",
        "for _ in range(int(x.sum().item())): x = x + 1\n# instead\nx = x + x.sum().long()",
    ),
    Cause(
        "packed-sequence",
        "recurrent layer on a packed sequence",
        "The number of steps of each sequence is data-dependent, and a graph has one number of steps for all.",
        "Pad the sequences and pass them as one tensor, or accept that the layer runs outside of the graph.",
        "y, h = lstm(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))\n# instead\ny, h = lstm(x)",
    ),
    Cause(
        "symbolic-spec",
        "spec of an intermediate DTensor with symbolic sizes",
        "backend='dtensor' makes the spec of a DTensor that the program computes a constant; its sizes must be static.",
        "Use placements, device_mesh and shape of the DTensor, or compile with dynamic=False.",
        "(d + 1)._spec\n# instead\n(d + 1).placements",
    ),
)

#: Code -> cause.
CAUSES: Mapping[str, Cause] = {cause.code: cause for cause in _ALL}


def cause(code: str) -> Cause:
    """The cause with that code.

    Raises:
        KeyError: there is none; the message names the nearest known code.
    """
    if code not in CAUSES:
        near = difflib.get_close_matches(code, CAUSES, n=1)
        raise KeyError(f"no cause {code!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return CAUSES[code]


def break_title(code: str) -> str:
    """The first line of the message of a graph break of this cause."""
    return f"dtensor backend: {cause(code).title} [{code}]"


_TITLE = re.compile(r"dtensor backend: [^\n\[]*\[(?P<code>[a-z0-9-]+)\]")


def code_in(message: str) -> str | None:
    """The code of the cause in the message of a graph break; None if it names none of ours."""
    found = _TITLE.search(message)
    return found["code"] if found and found["code"] in CAUSES else None
