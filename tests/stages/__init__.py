"""Steps of the pipeline in tests."""

import dataclasses
from unittest import mock


def with_run(module, name, step, run):
    """While active, the step of that name in the tuple `name` of a module of stages runs `run`."""
    steps = tuple(dataclasses.replace(one, run=run) if one.name == step else one for one in getattr(module, name))
    assert steps != getattr(module, name)
    return mock.patch.object(module, name, steps)
