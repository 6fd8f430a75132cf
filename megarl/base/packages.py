"""Optional packages: whether they are installed, without importing them, and the error for a missing one."""

from __future__ import annotations

import importlib.util

from megarl.base.errors import ConfigError
from megarl.base.provenance import install_command


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without the seconds that importing may take.

    Args:
        module: dotted name; its parents are imported.
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def require_sglang() -> None:
    """Check that SGLang is installed.

    Raises:
        ConfigError: it is missing; the message has the installation command.
    """
    if not is_installed("sglang"):
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang needs the package sglang (0.5.17 or later): "
            f"{install_command('sglang')}; on a machine without a GPU, the environment of launch/sglang_cpu.sh. "
            "Without SGLang: actor_rollout_ref.rollout.name=embedded"
        )
