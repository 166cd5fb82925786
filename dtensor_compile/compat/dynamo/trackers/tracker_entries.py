"""Description, as data, of the entries installed while Dynamo traces for our backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import Source

from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator

Backend = Callable[..., Any]


#: Makes a tracker of an opaque object: ``(tx, proxy, value, source, options)``.
Track = Callable[[Translator, Any, Any, "Source | None", Mapping[str, Any]], VariableTracker]


#: Makes a tracker of a value that tracing made: ``(tx, value)``.
TrackMade = Callable[[Translator, Any], VariableTracker]


#: Makes a tracker of a specific object from torch's tracker.
Retrack = Callable[[VariableTracker], VariableTracker]


#: Makes a tracker of an object that is an input: ``(builder, value)``.
TrackGiven = Callable[[VariableBuilder, Any], VariableTracker]


#: Makes the tracker of a tensor of one class, with its guards: ``(track, source, value)``, where ``track()`` makes
#: torch's tracker and guards.
TrackTensor = Callable[[Callable[[], VariableTracker], Source, Any], VariableTracker]


Objects = tuple[tuple[Any, Retrack], ...]


Contexts = tuple[Callable[[], AbstractContextManager[None]], ...]


@dataclass(frozen=True)
class Entries:
    """Trackers and contexts that are installed while Dynamo traces for our backend.

    Attributes:
        opaque: by class of an opaque object (subclasses included), the function that makes its tracker.
        made: the same by class of a value that tracing made (subclasses excluded).
        objects: pairs of a specific object, for instance a class, and the function that makes its tracker.
        contexts: functions that return context managers, which are entered meanwhile.
        tensors: by class of a tensor with a source (subclasses excluded), the function that makes its tracker and
            guards it.
        given: by class of an object with a source (subclasses excluded), the function that makes its tracker.
    """

    opaque: Mapping[type, Track]
    made: Mapping[type, TrackMade]
    objects: Objects
    contexts: Contexts = ()
    tensors: Mapping[type, TrackTensor] = field(default_factory=dict)
    given: Mapping[type, TrackGiven] = field(default_factory=dict)
