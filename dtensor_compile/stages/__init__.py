"""What `dtensor_compile.backend` does to a program, as lists of steps: one module for each kind of graph, in the order
in which they come.

    program     the graph of torch functions over DTensors that Dynamo gives
    joint       the graph of forward and backward over local tensors that AOTAutograd traces, redistributions as nodes
    lowered     the forward graph, and the backward graph, with collectives in place of redistributions
    kernels     what Inductor made of a lowered graph

All are given one `compilation.Compilation`.
"""
