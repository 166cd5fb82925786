"""Lowering: from ``dtensor_compile::redistribute`` nodes to collectives, in the form that is fastest on a backend.

- On the joint graph: ``check_memory`` (no plan within the bound), ``regather`` (gathers repeated in the backward),
  ``drop_copies`` and ``drop_views`` (redundant copies, and views of tensors as they are), ``order_rows`` with
  ``chunk_order`` (gathered rows stay in the order of the collective), ``send_transposed`` (columns are sent as rows).
- On a forward or backward graph: ``lower`` (every node becomes the expansion of its plan), ``lower_collectives``
  (collectives of the program), ``reduce_by_exchange`` and ``receive_before_sending`` (faster forms on gloo).
"""
