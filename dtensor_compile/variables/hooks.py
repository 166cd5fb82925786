"""Backward passes that a program runs itself, and the hooks that belong to them.

``backward()`` and ``torch.autograd.grad`` inside a region become part of its graph.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor_compile.compat.backward import TracedGrad, backward_in_the_region
from dtensor_compile.compat.dynamo import Retrack

OBJECTS: tuple[tuple[Any, Retrack], ...] = ((torch.autograd.grad, TracedGrad.retrack),)
CONTEXTS = (backward_in_the_region,)
