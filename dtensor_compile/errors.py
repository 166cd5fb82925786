"""The errors that this package raises on purpose. Each message states the problem and the remedy."""

from __future__ import annotations


class DTensorCompileError(RuntimeError):
    """Base of every error that the package raises on purpose."""


class UnsupportedTorchError(DTensorCompileError):
    """The installed torch release is outside the supported range."""


class OptionError(DTensorCompileError, ValueError):
    """An option of ``torch.compile(..., backend="dtensor", options={...})`` is unknown or has a wrong value."""


class NoProcessGroupError(DTensorCompileError):
    """``torch.distributed`` is not initialized, or the process group of a mesh was destroyed."""


class MeshError(DTensorCompileError):
    """A device mesh does not fit the job: ranks that do not exist, an unavailable device type."""


class PlacementError(DTensorCompileError, ValueError):
    """The placements of a tensor do not fit its mesh or its number of dims."""


class PlanError(DTensorCompileError):
    """No sequence of collectives leads from one spec to the other."""


class MemoryBudgetError(PlanError):
    """Every sequence of collectives from one spec to the other holds more bytes at once than
    ``redistribution_memory``.
    """


class SpecTextError(DTensorCompileError, ValueError):
    """The text form of a spec or of a mesh layout does not parse."""


class TopologyError(DTensorCompileError, ValueError):
    """A topology is neither a preset nor a file, or the file does not describe a topology."""


class AgreementError(DTensorCompileError):
    """Ranks compiled graphs that cannot run together: they call different collectives over the same process group."""


class NotSavedError(DTensorCompileError):
    """``aot_compile`` cannot save a program: it needs code around its compiled graph, which torch does not save."""


class ManualRegionError(DTensorCompileError):
    """A manual region does not fit the tensors that enter or leave it, or a tensor leaves it unclosed."""


class OfflineError(DTensorCompileError):
    """A device cannot be emulated here, or the program needs a real one."""


def one_line(error: BaseException) -> str:
    """The first line of the message of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
