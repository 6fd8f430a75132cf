"""What megarl uses of Ray's private modules, and how it does without.

All of it concerns the driver. With a version of Ray that lacks one of the names, Ray runs as it is in that respect: a
local Ray listens on all interfaces, its authentication is that of the user's shell, or its messages are printed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

TESTED = "2.60.0"
"""Version of Ray that this file was tested with, that of ``megarl/pins/``."""
NAMES = {
    "ENABLE_RAY_CLUSTER": "ray._private.ray_constants",
    "Config": "ray._raylet",
    "AuthenticationTokenLoader": "ray._raylet",
    "print_to_stdstream": "ray._private.worker",
    "_unhandled_error_handler": "ray._private.worker",
    "get_accelerator_manager_for_resource": "ray._private.accelerators",
    "get_dashboard_dependency_error": "ray._private.utils",
}
"""Private names of Ray, with their modules."""

logger = logging.getLogger(__name__)


def find(name: str) -> tuple[Any, Any] | None:
    """Return the module and the value of a name in :data:`NAMES`; None if this Ray lacks the name."""
    with contextlib.suppress(ImportError, KeyError):
        module = import_module(NAMES[name])
        return (module, getattr(module, name)) if hasattr(module, name) else None
    return None


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Have a Ray that starts in this block listen on 127.0.0.1, which ``ray.init`` replaces by a remote address.

    Ray's switch for that is an environment variable, see :data:`~megarl.cluster.local_ray.LOOPBACK_SWITCH`, which this
    process has already read.
    """
    if (found := find("ENABLE_RAY_CLUSTER")) is None:
        logger.warning("this version of Ray listens on all interfaces; version %s on 127.0.0.1 only", TESTED)
        yield
        return
    module, before = found
    module.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        module.ENABLE_RAY_CLUSTER = before


def read_authentication() -> bool:
    """Let Ray's library in this process, which caches them, read the variables of authentication again.

    Returns:
        False if this version of Ray cannot: its authentication is that of the environment in which it was imported.
    """
    config, loader = find("Config"), find("AuthenticationTokenLoader")
    if config is None or loader is None:
        return False
    config[1].initialize("")
    loader[1].instance().reset_cache()
    return True


def log_messages() -> None:
    """Log, instead of print, the messages of Ray's node processes; that of a raylet that died has its whole log."""

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        logger.info("Ray (%s): %s", data.get("pid"), "\n".join(data.get("lines", ())))

    if found := find("print_to_stdstream"):
        found[0].print_to_stdstream = log


def log_unread_errors() -> None:
    """Log, instead of print, the error of a Ray task whose result is never read."""

    def log(error: Exception) -> None:
        logger.info("error of a Ray task whose result was not read: %s", error)

    if found := find("_unhandled_error_handler"):
        found[0]._unhandled_error_handler = log


def gpu_count() -> int:
    """Count the visible GPUs of this machine (``CUDA_VISIBLE_DEVICES``); Ray asks the driver, without torch."""
    if (found := find("get_accelerator_manager_for_resource")) is None:
        import torch

        return torch.cuda.device_count()
    manager = found[1]("GPU")
    count, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
    return int(count if visible is None else min(count, len(visible)))


def dashboard_error() -> str:
    """Describe the missing package of Ray's dashboard, without starting Ray; empty if all are installed."""
    found = find("get_dashboard_dependency_error")
    error = found[1]() if found else None
    return "" if error is None else str(error)
