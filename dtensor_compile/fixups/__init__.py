"""Mends of torch's graphs, one symptom each. The docstring of each says what is known of it upstream, which releases of
torch need it, and when it can go.
"""
