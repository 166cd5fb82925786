"""Fixups of torch's graphs, one symptom each. Their docstrings give the upstream status, the releases of torch that
need them, and when to remove them.
"""
