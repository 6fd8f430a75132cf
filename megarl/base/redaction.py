"""Redaction of secrets (API keys, tokens, passwords) before a config, command or log line is written.

A value is a secret by the name of its key (``api_key``, ``password``, ...) or by its form (``http://user:password@host``,
``sk-...``, ``hf_...``). A reference such as ``${oc.env:NAME}`` is no secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "<redacted>"

_WORDS = (
    "api[_-]?key|access[_-]?key|private[_-]?key|secret(?:[_-]?key)?|token|password|passwd|passphrase|credentials?"
    "|authorization|bearer"
)
_NAME = re.compile(rf"(?:^|[_.])(?:{_WORDS})$")
_SPECIAL_TOKEN = re.compile(
    r"(?:eos|bos|pad|unk|sep|cls|mask|stop|start|end|begin|first|last|new|per|image|video|audio|think|chat|special)_token$"
)
_ASSIGNMENT = re.compile(
    rf"""(?P<name>\b(?:[\w.\-]*[_.\-])?(?:{_WORDS}))(?P<quote>["']?)(?P<sign>\s*[=:]\s*)"""
    r"""(?P<value>"[^"\n]*"|'[^'\n]*'|(?:Bearer|Basic)\s+\S+|\$\{[^}]*\}|[^\s"',;&{}\[\]()]+)""",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)(?!\$\{)[^\s/@'\"]+@")
_FORMS = re.compile(
    r"\b(?:sk-[\w\-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abprs]-[\w\-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]{5,}|(?<=Bearer )[\w\-.=+/]{8,})"
)
_SHORTEST = 6  # shorter values are not searched in texts: they would hide ordinary words


class _KnownSecrets:
    """Secret values of the run's configuration, which are redacted wherever they occur in a text."""

    def __init__(self) -> None:
        self.values: tuple[str, ...] = ()


_KNOWN = _KnownSecrets()


def remember_secrets(config: Mapping[str, Any]) -> None:
    """Search the secret values of a configuration, to redact them in every later text.

    Args:
        config: nested plain values, resolved.
    """
    values = {text for text in _secret_values(config) if len(text) >= _SHORTEST and REDACTED not in text}
    _KNOWN.values = tuple(sorted(values, key=len, reverse=True))


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of nested plain values with secrets replaced by ``<redacted>``.

    Args:
        value: mappings, lists and plain values.
        name: key of the value.
    """
    if isinstance(value, Mapping):
        return {key: redact(inner, name if is_secret_name(name) else str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, name) for inner in value]
    if is_secret_name(name) and _holds_secret(value):
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Replace the secrets in a text: a log line, a command, or an override ``key=value``."""
    for secret in _KNOWN.values:
        text = text.replace(secret, REDACTED)
    text = _URL_USER.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _FORMS.sub(REDACTED, text)
    return _ASSIGNMENT.sub(_redact_assignment, text)


def is_secret_name(name: str) -> bool:
    """Return whether the values of a key are secrets, by its name."""
    name = name.lower().replace("-", "_")
    return bool(_NAME.search(name)) and not _SPECIAL_TOKEN.search(name)


def _redact_assignment(match: re.Match[str]) -> str:
    value = match["value"].strip("\"'")
    if not is_secret_name(match["name"]) or not _holds_secret(value) or value.isdigit() or value == "null":
        return match[0]
    return f"{match['name']}{match['quote']}{match['sign']}{REDACTED}"


def _holds_secret(value: Any) -> bool:
    if value is None or isinstance(value, bool) or value == "":
        return False
    return not (isinstance(value, str) and re.fullmatch(r"\$\{[^}]*\}", value))


def _secret_values(value: Any, name: str = "") -> Iterable[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secret_values(inner, name if is_secret_name(name) else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_values(inner, name)
    elif is_secret_name(name) and _holds_secret(value):
        yield str(value)
    elif isinstance(value, str):
        yield from (password for password in re.findall(r"://[^\s/@:]*:([^\s/@]+)@", value) if password)
