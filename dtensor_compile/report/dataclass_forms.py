"""JSON form of dataclasses of plain data: reading them, and their schema."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def read_as(form: Any, value: Any) -> Any:
    """`value` as an object of `form`: a dataclass, a tuple, an optional, or plain data."""
    if dataclasses.is_dataclass(form):
        hints = typing.get_type_hints(form)
        names = [f.name for f in dataclasses.fields(form) if f.name in value]
        return form(**{name: read_as(hints[name], value[name]) for name in names})  # type: ignore[operator]
    origin, args = typing.get_origin(form), typing.get_args(form)
    if origin is tuple:
        return tuple(read_as(args[0], item) for item in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else read_as(next(a for a in args if a is not type(None)), value)
    return value


def schema_of(form: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of `form`; adds those of dataclasses to `definitions`, by their names.

    Raises:
        TypeError: `form` has no JSON form.
    """
    if form in _PLAIN:
        return {"type": _PLAIN[form]}
    if dataclasses.is_dataclass(form):
        name = form.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            hints = typing.get_type_hints(form)
            names = [f.name for f in dataclasses.fields(form)]
            definitions[name] = {
                "type": "object",
                "description": (form.__doc__ or "").strip().splitlines()[0],
                "properties": {n: schema_of(hints[n], definitions) for n in names},
                "required": names,
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}
    origin, args = typing.get_origin(form), typing.get_args(form)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0], definitions)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [{"type": "null"} if a is type(None) else schema_of(a, definitions) for a in args]}
    raise TypeError(f"{form} has no JSON form")
