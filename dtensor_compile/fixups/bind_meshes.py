"""Takes meshes that the forward returns from its own inputs.

The joint graph takes the meshes of its inputs (primals) and those of the tangents. Equal meshes may be different
objects: a deep copy of a parameter carries a copy of its mesh, and torch's caches of sharding decisions answer with the
first equal one. A forward output can then be bound to the mesh of a tangent, which the forward graph does not have, and
the partitioner refuses the graph. Or the tracer makes the mesh from another mesh of the graph, by an operator that
Inductor does not support. Equal meshes are interchangeable, so every use of such a mesh is replaced by the first equal
primal.

    before   def joint(x, mesh, tangent, tangent_mesh): return (relu(x), tangent_mesh), ...
    after    def joint(x, mesh, tangent, tangent_mesh): return (relu(x), mesh), ...

Upstream: https://github.com/pytorch/torchtitan/issues/3013 (graph_trainer JIT fails with 'Node tangents_2 was invalid,
    but is output' when module forward returns a DTensor).
Releases: 2.13 to 2.14.
Remove when: AOTAutograd takes the mesh of a forward output from a primal.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.distributed.device_meshes import real_mesh


def bind_meshes_to_primals(graph: torch.fx.Graph) -> None:
    """Replaces meshes that come with tangents, or are made in the graph, by equal ones that come with primals."""
    primals: list[torch.fx.Node] = []
    for node in list(graph.nodes):
        mesh = real_mesh(node.meta.get("val"))
        if not isinstance(mesh, DeviceMesh):
            continue
        if node.op == "placeholder" and not str(node.target).startswith("tangents"):
            primals.append(node)
            continue
        equal = next((primal for primal in primals if real_mesh(primal.meta["val"]) == mesh), None)
        if equal is not None:
            node.replace_all_uses_with(equal)
            if node.op != "placeholder":
                graph.erase_node(node)
