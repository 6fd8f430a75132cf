"""Token authentication of a Ray that a run starts: a random token, in a file that only this user can read."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class ClusterToken:
    """Token of one local Ray: processes without it can neither join the cluster nor query it.

    Ray by itself depends on the user's shell (``RAY_AUTH_MODE=disabled``), and shares one token between all clusters
    of a user, in ``~/.ray/auth_token``, which other users can read.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="megarl-ray-token-"))  # mode 0700
        self.file = self._folder / "token"
        self.file.touch(0o600)
        self.file.write_text(secrets.token_hex(32))

    def environment(self) -> dict[str, str | None]:
        """Return the environment variables of Ray's processes; None = unset."""
        return dict(zip(_VARIABLES, ("token", None, str(self.file)), strict=True))

    def close(self) -> None:
        """Delete the token, once Ray has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


def read_authentication() -> None:
    """Let Ray's library in this process, which caches them, read the variables of authentication again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
