"""The errors this package raises on purpose. Each message says what is wrong and what to do about it."""

from __future__ import annotations


class DTensorCompileError(RuntimeError):
    """Base of every error that the package raises on purpose."""


class UnsupportedTorchError(DTensorCompileError):
    """The installed torch release is outside the supported range."""


class OptionError(DTensorCompileError, ValueError):
    """An option of ``torch.compile(..., backend="dtensor", options={...})`` is unknown or has a wrong value."""


class NoProcessGroupError(DTensorCompileError):
    """``torch.distributed`` is not initialized, or the process group of a mesh is gone."""


class MeshError(DTensorCompileError):
    """A device mesh does not fit the job: ranks that do not exist, a device type that is not there."""


class PlacementError(DTensorCompileError, ValueError):
    """The placements of a tensor do not fit its mesh or its number of dims."""


class PlanError(DTensorCompileError):
    """No sequence of collectives leads from one spec to the other."""


class MemoryBudgetError(PlanError):
    """Sequences of collectives lead from one spec to the other, and all hold more at once than
    ``redistribution_memory``.
    """


class SpecTextError(DTensorCompileError, ValueError):
    """The text form of a spec or of a mesh layout does not parse."""


class TopologyError(DTensorCompileError, ValueError):
    """A topology is neither a preset nor a file, or the file does not say what a topology is."""


class AgreementError(DTensorCompileError):
    """Ranks compiled graphs that cannot run together: they call different collectives over the same process group."""


class ManualRegionError(DTensorCompileError):
    """A manual region does not fit the tensors that enter or leave it, or one leaves it that was not closed."""


class OfflineError(DTensorCompileError):
    """A device that is not there cannot be emulated here, or the program asks of it what only a real one can do."""
