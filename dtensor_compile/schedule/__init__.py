"""Scheduling: the order of operators and collectives of a lowered graph."""
