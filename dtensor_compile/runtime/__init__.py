"""Code that runs around a compiled graph, in each call or before the first one.

The code that runs in each call for each input and output DTensor is in C++ (`native`), since the cost of DTensors in
torch is that of a Python function per parameter.
"""
