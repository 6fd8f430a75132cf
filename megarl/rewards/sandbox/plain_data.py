"""JSON form of plain Python data, exchanged between a program and the judge of its assertions.

``assertions.py`` copies this file into the sources of both processes, so it uses the standard library only. Reading
never runs code of the sender: a value of its own class becomes a handle, and subclasses of plain types become plain.
"""

from typing import Any

_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, handle: Any) -> Any:
    """Return the JSON form of a value; ``handle`` encodes everything that is no plain data."""
    if value is None or type(value) in (bool, str, int, float):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encode(item, handle) for item in value]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            items = sorted(value, key=repr) if name != "tuple" else value
            return {"type": name, "value": [encode(item, handle) for item in items]}
    if isinstance(value, dict):
        return {"type": "dict", "value": [[encode(k, handle), encode(v, handle)] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"type": "bytes", "value": value.hex()}
    if isinstance(value, complex):
        return {"type": "complex", "value": [value.real, value.imag]}
    if isinstance(value, range):
        return {"type": "range", "value": [value.start, value.stop, value.step]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), handle)
    return handle(value)


def decode(data: Any, handle: Any) -> Any:
    """Return the value of a JSON form; ``handle`` reads everything that is no plain data.

    Raises:
        ValueError, TypeError, KeyError: the form is malformed.
    """
    if isinstance(data, list):
        return [decode(item, handle) for item in data]
    if not isinstance(data, dict):
        return data
    kind, value = data["type"], data["value"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, handle) for item in value)
    if kind == "dict":
        return {decode(k, handle): decode(v, handle) for k, v in value}
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "complex":
        return complex(*value)
    if kind == "range":
        return range(*value)
    return handle(data)
