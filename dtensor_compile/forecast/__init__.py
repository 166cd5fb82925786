"""Forecasts of a training step on a cluster that is not there: its memory and its time, of the code that would run."""
