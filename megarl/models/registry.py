"""Which model families exist: a decorator and a dict from Hugging Face architecture names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megarl.errors import ModelError

if TYPE_CHECKING:
    from megarl.models.declaration import Declaration


class AttentionTraits(NamedTuple):
    """What distinguishes one family's attention from another's."""

    qkv_bias: bool
    qk_norm: bool


class Family(Protocol):
    """A model family; its module holds declarations only."""

    name: str
    layer: tuple[Declaration, ...]
    """Parameters of one decoder layer, in the order in which Megatron holds them."""

    def traits(self, raw: Mapping[str, Any]) -> AttentionTraits:
        """Attention traits of a ``config.json``.

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
        raise ModelError(f"architecture '{architecture}' has no weight map; known ones: {', '.join(known)}")
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
