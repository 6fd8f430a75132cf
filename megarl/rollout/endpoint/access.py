"""Who may ask: a token, made for each run and told in a file that its owner alone can read."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from pathlib import Path

from megarl.errors import ConfigError

TOKEN_VARIABLE = "MEGARL_ENDPOINT_TOKEN"
"""Environment variable of the driver that sets the token, for clients that must know it beforehand."""
_SHORTEST = 16


def make_token() -> str:
    """32 random bytes, or what the environment says.

    Raises:
        ConfigError: the environment's is too short, or cannot stand in a header.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(32)
    if len(given) < _SHORTEST or not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError(
            f"the environment variable {TOKEN_VARIABLE} must hold at least {_SHORTEST} printable ASCII characters "
            f"without a blank; it holds {len(given)}"
        )
    return given


def is_token(token: str, header: str | None) -> bool:
    """Whether an ``Authorization`` header bears the token; takes as long whatever it differs in."""
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return scheme.lower() == "bearer" and same


def write_access_file(path: Path, base_url: str, token: str, model: str) -> None:
    """Writes what a client needs as JSON, ``base_url``, ``api_key`` and ``model``, for the owner's eyes only.

    Raises:
        ConfigError: it cannot be written.
    """
    content = json.dumps({"base_url": base_url, "api_key": token, "model": model}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # New, and with these rights from the begin: nobody who had an older file open reads along.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(content)
    except OSError as error:
        key = "actor_rollout_ref.rollout.endpoint.access_file"
        raise ConfigError(f"{key}={path} cannot be written: {error}") from error
