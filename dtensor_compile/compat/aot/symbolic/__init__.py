"""Symbolic sizes of a graph that AOTAutograd traces."""
