"""Forecasts of memory and time of a training step on a cluster that is not available, from the code that would run
there."""
