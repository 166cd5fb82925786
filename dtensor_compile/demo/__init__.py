"""The demonstration: a small Llama, three ways to spread it over ranks, and a run that compares eager, stock and this
backend.
"""
