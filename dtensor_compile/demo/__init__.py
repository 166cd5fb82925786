"""The demonstration: a small Llama, three ways to parallelize it, and a run that compares eager, stock and this
backend.
"""
