"""Placements for a whole training step: of parameters, inputs and the operators' inputs, chosen together."""
