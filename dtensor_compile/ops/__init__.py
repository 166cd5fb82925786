"""Operators of a graph: redistributions, collectives, random numbers; and the execution of plans on local tensors."""
