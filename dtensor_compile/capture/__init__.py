"""Capture: from a program over DTensors to a graph of local tensors and ``dtensor_compile::redistribute`` nodes.

- ``spec``: the text form of placements, and back.
- ``mesh``: the text form of a mesh, and back; coordinates and groups from plain integers.
- ``redistribute``: the operator.
- ``trace``: the scope in which torch's redistributions become that operator.
"""
