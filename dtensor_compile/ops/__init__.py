"""Operators of a graph: redistributions, collectives, random numbers; and how a plan is carried out on local
tensors.
"""
