"""What is in place while Dynamo traces for our backend, as data: what makes trackers, and of what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import Source

from dtensor_compile.compat.dynamo.tracker_tools import Translator

Backend = Callable[..., Any]


#: Makes a tracker of an opaque object: ``(tx, proxy, value, source, options)``.
Track = Callable[[Translator, Any, Any, "Source | None", Mapping[str, Any]], VariableTracker]


#: Makes a tracker of a value that tracing made: ``(tx, value)``.
TrackMade = Callable[[Translator, Any], VariableTracker]


#: Makes a tracker of one certain object from the one that torch makes.
Retrack = Callable[[VariableTracker], VariableTracker]


#: Makes a tracker of an object that the program was given: ``(builder, value)``.
TrackGiven = Callable[[VariableBuilder, Any], VariableTracker]


#: Makes the tracker of a tensor of one class, with its guards: ``(what makes torch's tracker and guards, source,
#: value)``.
TrackTensor = Callable[[Callable[[], VariableTracker], Source, Any], VariableTracker]


Objects = tuple[tuple[Any, Retrack], ...]


Contexts = tuple[Callable[[], AbstractContextManager[None]], ...]


@dataclass(frozen=True)
class Entries:
    """What is in place while Dynamo traces for our backend.

    Attributes:
        opaque: class of an opaque object (subclasses included) to what makes its tracker.
        made: class of a value that tracing made (subclasses excluded) to what makes its tracker.
        objects: pairs of one certain object, a class for instance, and what makes its tracker.
        contexts: make context managers that are entered meanwhile.
        tensors: class of a tensor with a source (subclasses excluded) to what makes its tracker and guards it.
        given: class of an object with a source (subclasses excluded) to what makes its tracker.
    """

    opaque: Mapping[type, Track]
    made: Mapping[type, TrackMade]
    objects: Objects
    contexts: Contexts = ()
    tensors: Mapping[type, TrackTensor] = field(default_factory=dict)
    given: Mapping[type, TrackGiven] = field(default_factory=dict)
