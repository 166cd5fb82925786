"""accelerate and the Trainer of transformers: adds the backend's names to those that accelerate knows.

    from dtensor_compile.integrations.accelerate import enable

    enable()
    accelerator = Accelerator(dynamo_backend="dtensor")     # before: 'DTENSOR' is not a valid DynamoBackend
    arguments = TrainingArguments(output, torch_compile_backend="dtensor")      # before: the same, from Trainer(...)

accelerate compares the name of a backend with a closed enum, `DynamoBackend`, whatever torch has registered. Python
calls the ``_missing_`` hook of an enum for values that are not members; `enable` makes it return values for the names
of this backend, and leaves the members, their order and all other names unchanged.
"""

from __future__ import annotations

from typing import Any

from dtensor_compile.integrations import third_party

TESTED = ("1.15.0",)
#: The backends "dtensor" and "dtensor_aten" in accelerate's spelling; it lowercases names for ``torch.compile``.
NAMES = ("DTENSOR", "DTENSOR_ATEN")

DynamoBackend: Any = third_party("accelerate", TESTED).utils.DynamoBackend


def _value(name: str) -> Any:
    value = str.__new__(DynamoBackend, name)
    value._name_ = value._value_ = name
    return value


_values = {name: _value(name) for name in NAMES}


def _missing(cls: type, value: object) -> Any:
    return _values.get(value) if isinstance(value, str) else None


def enable() -> None:
    """Makes "dtensor" and "dtensor_aten" backends of accelerate, for the whole process; idempotent.

    From then on ``Accelerator(dynamo_backend=...)``, ``TorchDynamoPlugin(backend=...)``, the variable
    ``ACCELERATE_DYNAMO_BACKEND`` and ``TrainingArguments(torch_compile_backend=...)`` take these names.

    Raises:
        RuntimeError: accelerate, or another package, handles unknown names itself.
    """
    if enabled():
        return
    if "_missing_" in vars(DynamoBackend):
        raise RuntimeError(
            "accelerate.utils.DynamoBackend has a `_missing_` of its own, which enable() would replace: "
            'compile the model itself, by model.compile(backend="dtensor") after accelerator.prepare'
        )
    DynamoBackend._missing_ = classmethod(_missing)
    for name, value in _values.items():
        setattr(DynamoBackend, name, value)


def disable() -> None:
    """Undoes `enable`; idempotent. Plugins that were created meanwhile keep their backend."""
    if enabled():
        del DynamoBackend._missing_
        for name in NAMES:
            delattr(DynamoBackend, name)


def enabled() -> bool:
    """Whether `enable` is in effect."""
    hook = vars(DynamoBackend).get("_missing_")
    return hook is not None and hook.__func__ is _missing
