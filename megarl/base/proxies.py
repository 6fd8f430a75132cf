"""Proxies of the environment, which HTTP clients would also use for servers on this machine."""

from __future__ import annotations

import os

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bypass_proxies(*hosts: str) -> None:
    """Let HTTP clients of this process and its children reach loopback addresses and ``hosts`` without a proxy.

    Without a proxy in the environment, nothing changes.
    """
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return
    entries = [entry for name in ("no_proxy", "NO_PROXY") for entry in os.environ.get(name, "").split(",")]
    direct = ",".join(dict.fromkeys(entry.strip() for entry in (*entries, *_LOOPBACK, *hosts) if entry.strip()))
    os.environ.update(no_proxy=direct, NO_PROXY=direct)
