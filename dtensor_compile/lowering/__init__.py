"""Lowering: from ``dtensor_compile::redistribute`` nodes to collectives, in the form that a backend sends best.

- On the joint graph: ``check_memory`` (no plan within the bound), ``regather`` (what backward gathers again),
  ``drop_copies`` (copies that nobody can tell from what was sent), ``order_rows`` with ``chunk_order`` (gathered rows
  stay in the order of the collective), ``send_transposed`` (columns are sent as rows).
- On a forward or backward graph: ``lower`` (every node becomes the expansion of its plan), ``lower_collectives`` (those
  of the program), ``reduce_by_exchange`` and ``receive_before_sending`` (what gloo sends best).
"""
