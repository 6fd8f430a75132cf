"""What an installed SGLang can do, found by looking and not by its version number."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

from megarl.errors import ConfigError


def is_installed() -> bool:
    """Whether SGLang can be imported; does not import it, which takes seconds."""
    return importlib.util.find_spec("sglang") is not None


def require_installed() -> None:
    """Makes sure that SGLang is there.

    Raises:
        ConfigError: it is not; says how to get it.
    """
    if not is_installed():
        raise ConfigError(
            "rollout.name=sglang needs the package sglang (0.5.17 or later): pip install 'megarl[gpu]', or on a "
            "machine without a GPU the environment that launch/sglang_cpu.sh makes"
        )


@functools.cache
def server_arg_names() -> frozenset[str]:
    """Names of the fields of SGLang's ``ServerArgs``, which is a dataclass or a msgspec structure by version."""
    from sglang.srt.server_args import ServerArgs

    return frozenset(field_names(ServerArgs))


def field_names(kind: type) -> list[str]:
    """Names of a structure's fields, in order.

    Raises:
        TypeError: it is no structure.
    """
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    fields = getattr(kind, "__struct_fields__", None)
    if fields is None:
        fields = getattr(kind, "model_fields", None)
    if fields is None:
        raise TypeError(f"{kind.__name__} is neither a dataclass nor a structure")
    return list(fields)


def request_of(name: str, fields: dict[str, Any]) -> Any:
    """A request structure of ``sglang.srt.managers.io_struct`` with those of ``fields`` that it knows.

    Later versions have fields that earlier ones lack, and none of those that are left out here matters to them.
    """
    from sglang.srt.managers import io_struct

    kind = getattr(io_struct, name)
    known = set(field_names(kind))
    return kind(**{key: value for key, value in fields.items() if key in known})
