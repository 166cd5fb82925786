"""Capture: from a program over DTensors to a graph of local tensors and ``dtensor_compile::redistribute`` nodes.

- ``trace``: the scope in which torch's redistributions become that operator.
- ``checks``: of process groups, meshes and placements, before compilation.
- ``sharding_rules``: operators for which DTensor has no rule.
- ``cross_mesh``: `redistribute` between meshes.
- ``gradient_placements``: gradients with unexpected placements; ``cacheable``: programs that torch's caches can keep.
"""
