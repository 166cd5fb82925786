"""The pipeline of `dtensor_compile.backend` as lists of steps: one module for each kind of graph, in this order.

    program     the graph of torch functions over DTensors that Dynamo captures
    joint       the graph of forward and backward over local tensors that AOTAutograd traces, redistributions as nodes
    lowered     the forward graph, and the backward graph, with collectives in place of redistributions
    kernels     Inductor's kernels of a lowered graph

All steps share one `compilation.Compilation`.
"""
