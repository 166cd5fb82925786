"""What the host needs for a step: seconds for each kernel, collective, call and operator that it issues."""

from __future__ import annotations

from dtensor_compile.forecast.step_log import Request

#: Seconds of the host, measured beside an H100 (2026-11-26; `tools/measure_device.py`): for a kernel or an operator of
#: compiled code, for a collective of it, for a call of it, for an operator in eager, and for each tensor of its lists.
HOST_COMPILED, HOST_COLLECTIVE, HOST_CALL, HOST_EAGER, HOST_LISTED = 8e-6, 3.4e-5, 4e-4, 8e-6, 1.5e-7
#: Seconds of the host besides for an operator over DTensors in eager, and for each DTensor in its lists: what AdamW and
#: clipping take more with DTensors than with their local tensors, on a host without a GPU (2026-11-29;
#: `tools/measure_device.py`). An operator that writes in place takes 19 to 22 us, one with a result 31.
HOST_DISPATCH, HOST_DISPATCHED = 2e-5, 1.3e-6
#: What `issue_seconds` rests on.
HOST_BASIS = (
    f"{HOST_COMPILED * 1e6:.0f} us for a kernel of compiled code, {HOST_CALL * 1e6:.0f} us for a call of it, "
    f"{HOST_EAGER * 1e6:.0f} us for an operator in eager, {HOST_DISPATCH * 1e6:.0f} us more for one over DTensors and "
    f"{HOST_DISPATCHED * 1e6:.1f} us for each in its lists, as measured on one host each"
)


def issue_seconds(before: Request | None, this: Request) -> float:
    """Seconds of the host for a request, which follows another."""
    dispatch = HOST_DISPATCH * this.dispatches + HOST_DISPATCHED * this.dispatched
    if this.graph < 0:
        return dispatch + HOST_EAGER + HOST_LISTED * this.listed
    call = HOST_CALL if before is None or before.graph != this.graph or this.step == 0 else 0.0
    return dispatch + call + (HOST_COMPILED if this.operation.starts is None else HOST_COLLECTIVE)
