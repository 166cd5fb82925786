"""Lowering: from ``dtensor_compile::redistribute`` nodes to functional collectives.

- ``plan``: which collectives lead from one spec to another, and what they send; integers only.
- ``expand``: a plan carried out on a local tensor, real or fake.
- ``lower``: every node of a graph replaced by the expansion of its plan.
- ``schedule``, ``schedule_graph``, ``start_order``: the graph in an order in which collectives run beside compute.
"""
