"""Mends of torch's graphs, one symptom each."""
