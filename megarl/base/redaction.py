"""Redaction of secrets (API keys, tokens, passwords) before a config, command or log line is written.

A value is a secret by the name of its key (``api_key``, ``password``, ...) or by its form (``http://user:password@host``,
``sk-...``, ``hf_...``, a private key in PEM). A reference such as ``${oc.env:NAME}`` is no secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
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
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SCHEMES = "(?:Bearer|Basic|Token|Digest|Negotiate|ApiKey|Api-Key|Key)"
_VALUE = rf"""(?P<value>"[^"\n]*"|'[^'\n]*'|{_SCHEMES}\s+\S+|\$\{{[^}}]*\}}|[^\s"',;&{{}}\[\]()]+)"""
_ASSIGNMENT = re.compile(
    rf"""(?P<name>(?<![\w.\-])[\w.\-]*(?:{_WORDS}))(?P<quote>["']?)(?P<sign>\s*[=:]\s*){_VALUE}""", re.IGNORECASE
)
_OPTION = re.compile(rf"(?P<name>(?<!\S)--[\w.\-]*(?:{_WORDS}))(?P<quote>)(?P<sign>\s+)(?!-){_VALUE}", re.IGNORECASE)
_URL_USER = re.compile(r"(?P<scheme>(?<![A-Za-z0-9+.\-])[A-Za-z][A-Za-z0-9+.\-]*://)(?!\$\{)[^\s/@'\"]+@")
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w\-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w\-]{16,}|xox[abeprs]-[\w\-]{10,}|xapp-[\w\-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w\-]{35}"
    r"|ya29\.[\w\-]{16,}|nvapi-[\w\-]{16,}|gsk_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w\-]{20,}"
    r"|dckr_pat_[\w\-]{16,}|SG\.[\w\-]{16,}\.[\w\-]{16,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]{5,}"
    r"|(?<=Bearer )[\w\-.=+/]{8,})"
)
_PEM = re.compile(
    r"-----BEGIN (?P<kind>[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?)-----.*?(?:-----END (?P=kind)-----|\Z)", re.DOTALL
)
_SHORTEST = 6  # shorter values are not searched in texts: they would hide ordinary words


class _KnownSecrets:
    """The configuration's and this process's secret values, which are redacted wherever a text has them."""

    def __init__(self) -> None:
        self.values: tuple[str, ...] = ()
        self.own: set[str] = set()


_KNOWN = _KnownSecrets()


def remember_secrets(config: Mapping[str, Any]) -> None:
    """Search the secret values of a configuration, to redact them in every later text.

    Args:
        config: nested plain values, resolved.
    """
    values = {text for text in _secret_values(config) if len(text) >= _SHORTEST and REDACTED not in text}
    _KNOWN.values = tuple(sorted(values | _KNOWN.own, key=len, reverse=True))


def remember_secret(value: str) -> None:
    """Redact a secret that this process made, such as a token, in every later text."""
    _KNOWN.own.add(value)
    _KNOWN.values = tuple(sorted({*_KNOWN.values, value}, key=len, reverse=True))


def mask_known(text: str) -> str:
    """Replace the known secret values in a sample by asterisks; the positions of all other characters stay."""
    for secret in _KNOWN.values:
        text = text.replace(secret, "*" * len(secret))
    return text


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of nested plain values with secrets replaced by ``<redacted>``."""
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
    text = _PEM.sub(REDACTED, text)
    text = _URL_USER.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _FORMS.sub(REDACTED, text)
    return _OPTION.sub(_redact_assignment, _ASSIGNMENT.sub(_redact_assignment, text))


def redact_words(words: Sequence[str]) -> list[str]:
    """Replace the secrets in the words of a command, also in values with blanks."""
    redacted = []
    for before, word in pairwise(["", *words]):
        name, sign, value = word.partition("=")
        if before.startswith("--") and is_secret_name(before.lstrip("-")) and _is_redacted(before, word):
            redacted.append(REDACTED)
        elif sign and is_secret_name(name.lstrip("+~-")) and _is_redacted(name, value):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_text(word))
    return redacted


def is_secret_name(name: str) -> bool:
    """Return whether the values of a key are secrets, by its name."""
    name = _CAMEL_CASE.sub("_", name).lower().replace("-", "_")
    return bool(_NAME.search(name)) and not _SPECIAL_TOKEN.search(name)


def _redact_assignment(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"].strip("\"'")
    if not is_secret_name(name.lstrip("-")) or not _is_redacted(name, value):
        return match[0]
    return f"{name}{match['quote']}{match['sign']}{REDACTED}"


def _is_redacted(name: str, value: str) -> bool:
    """Return whether a value in a text is a secret. Digits are a password, but the id of a token."""
    is_number = value.isdigit() and name.lower().endswith("token")
    return _holds_secret(value) and value != "null" and not is_number


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
