"""Lowering: from ``dtensor_compile::redistribute`` nodes to functional collectives.

- ``plan``: which collectives lead from one spec to another; with ``shards`` (who holds what), ``costs``, ``moves`` (the
  steps there are), ``exchange`` (who sends what to whom) and ``torch_path`` (what torch would do); integers only.
- ``size_ranges``: for which of the sizes that vary a plan is the cheapest, and its cost in their symbols.
- ``expand``: a plan carried out on a local tensor, real or fake; ``rearrange`` for steps over several mesh dims.
- ``drop_copies``: copies of what was sent go away where nobody can tell them from it.
- ``order_rows``: gathered rows stay in the order of the collective; ``send_transposed``: columns are sent as rows;
  ``extra_copies`` counts what is copied all the same.
- ``lower``: every node of a graph replaced by the expansion of its plan; ``splice``: one graph put into another.
- ``view_again``: fake values of views, for compilers that ask them whose memory they are.
- ``overlap``: the passes over what is lowered, in order.
- ``reduce_by_exchange``, ``receive_before_sending``, ``bucket``: collectives in the form that the backend sends best,
  and fewer of them.
- ``send_contiguous``: reductions in the layout in which their results are used.
- ``left_alone``: what stages leave alone in a graph, as decisions with what that costs.
- ``schedule``, ``schedule_graph``, ``start_order``: the graph in an order in which collectives run beside compute.
"""
