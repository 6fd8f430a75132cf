"""Which model families exist: a decorator and a dict from Hugging Face architecture names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from megarl.errors import ModelError
from megarl.models.traits import Traits

if TYPE_CHECKING:
    from megarl.models.declaration import Declaration


class Family(Protocol):
    """A model family; its module holds declarations only."""

    name: str
    layer: tuple[Declaration, ...]
    """Parameters of a decoder layer, in the order in which Megatron holds them; each says which layers have it."""

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Traits of a ``config.json``.

        Raises:
            ModelError: the file asks for a variant that has no weight map.
        """


_FAMILIES: dict[str, Family] = {}


def register_family(*architectures: str) -> Callable[[type], type]:
    """Class decorator: makes a family answer to these names in the ``architectures`` field of ``config.json``."""

    def register(family: type) -> type:
        """Registers the class and returns it."""
        for architecture in architectures:
            _FAMILIES[architecture] = family()
        return family

    return register


def known_architectures() -> list[str]:
    """Architecture names that have a weight map, sorted."""
    import megarl.models.families  # noqa: F401  (its modules register themselves; they import this one)

    return sorted(_FAMILIES)


def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        ModelError: no family answers to the name; the known ones are listed.
    """
    known = known_architectures()
    if architecture not in _FAMILIES:
        raise ModelError(
            f"architecture '{architecture}' has no weight map; known ones: {', '.join(known)}; a family of your own is "
            "declared in a file that external_lib names (docs/add_a_model.md)"
        )
    return _FAMILIES[architecture]


def refuse_settings(raw: Mapping[str, Any], **supported: Any) -> None:
    """Refuses settings that would change what the model computes in a way its family does not declare.

    Args:
        raw: the whole ``config.json``.
        **supported: for each field the only value that is supported; an absent or null field passes.

    Raises:
        ModelError: a field has another value.
    """
    for field, value in supported.items():
        if raw.get(field) not in (None, value):
            raise ModelError(f"config.json: {field}={raw[field]!r} is not supported, only {value!r}")


def count(raw: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number from ``config.json``.

    Args:
        raw: the whole file.
        name: the field.
        default: value of an absent or null field; None = the field is required.
        least: smallest value allowed.

    Raises:
        ModelError: the field is missing, not a whole number, or too small.
    """
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = "a positive integer" if least == 1 else f"an integer >= {least}"
        raise ModelError(f"config.json: {name}={value!r}, expected {expected}")
    return value


def refuse_sliding_window(raw: Mapping[str, Any], default: int | None = None) -> None:
    """Refuses attention that does not reach back to the beginning of the longest sequence.

    Args:
        raw: the whole ``config.json``.
        default: the window of a file that does not say.

    Raises:
        ModelError: the window is shorter than ``max_position_embeddings``.
    """
    window = raw.get("sliding_window", default)
    if window is not None and window < raw.get("max_position_embeddings", 0):
        raise ModelError(
            f"config.json: sliding_window={window!r} is less than max_position_embeddings="
            f"{raw['max_position_embeddings']}, and attention over a window is not supported; if no sequence is "
            f"longer than {window!r}, set max_position_embeddings to it: the model then computes the same"
        )
