"""What the host needs for a step: seconds for each kernel, collective, call and operator that it issues."""

from __future__ import annotations

from dtensor_compile.forecast.step_log import Request

#: Seconds of the host, measured beside an H100 (2026-11-26; `tools/measure_device.py`): for a kernel or an operator of
#: compiled code, for a collective of it, for a call of it, for an operator in eager, and for each tensor of its lists.
HOST_COMPILED, HOST_COLLECTIVE, HOST_CALL, HOST_EAGER, HOST_LISTED = 8e-6, 3.4e-5, 4e-4, 8e-6, 1.5e-7
#: What `issue_seconds` rests on.
HOST_BASIS = (
    f"{HOST_COMPILED * 1e6:.0f} us for a kernel of compiled code, {HOST_CALL * 1e6:.0f} us for a call of it, "
    f"{HOST_EAGER * 1e6:.0f} us for an operator in eager, as measured on one host"
)


def issue_seconds(before: Request | None, this: Request) -> float:
    """Seconds of the host for a request, which follows another."""
    if this.graph < 0:
        return HOST_EAGER + HOST_LISTED * this.listed
    call = HOST_CALL if before is None or before.graph != this.graph or this.step == 0 else 0.0
    return call + (HOST_COMPILED if this.operation.starts is None else HOST_COLLECTIVE)
