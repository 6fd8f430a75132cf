"""What megarl uses of Ray's private modules, and how it does without.

All of it concerns the driver, and is for the tested version of Ray only. Another version runs as it is: a local Ray
listens on all interfaces, protected by its token, and Ray prints some messages on the console.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import ray

TESTED = "2.60.0"
"""Version of Ray whose private modules this file knows, that of ``megarl/pins/``."""

logger = logging.getLogger(__name__)


def is_tested() -> bool:
    """Return whether Ray has the version that this file knows."""
    return bool(ray.__version__ == TESTED)


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Have a Ray that starts in this block listen on 127.0.0.1, which ``ray.init`` replaces by a remote address.

    Ray's switch for that is an environment variable, see :data:`~megarl.cluster.local_ray.LOOPBACK_SWITCH`, which this
    process has already read.
    """
    if not is_tested():
        logger.info("Ray %s listens on all interfaces; %s would on 127.0.0.1 only", ray.__version__, TESTED)
        yield
        return
    constants = import_module("ray._private.ray_constants")
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def read_authentication() -> None:
    """Let Ray's library in this process, which caches them, read the variables of authentication again.

    Another version of Ray has read them if this process had a Ray session before.
    """
    if is_tested():
        library = import_module("ray._raylet")
        library.Config.initialize("")
        library.AuthenticationTokenLoader.instance().reset_cache()


def log_messages() -> None:
    """Log, instead of print, the messages of Ray's node processes; that of a raylet that died has its whole log."""

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        logger.info("Ray (%s): %s", data.get("pid"), "\n".join(data.get("lines", ())))

    if is_tested():
        import_module("ray._private.worker").print_to_stdstream = log


def log_unread_errors() -> None:
    """Log, instead of print, the error of a Ray task whose result is never read."""

    def log(error: Exception) -> None:
        logger.info("error of a Ray task whose result was not read: %s", error)

    if is_tested():
        import_module("ray._private.worker")._unhandled_error_handler = log


def gpu_count() -> int:
    """Count the visible GPUs of this machine (``CUDA_VISIBLE_DEVICES``); Ray asks the driver, without torch."""
    if not is_tested():
        import torch

        return torch.cuda.device_count()
    manager = import_module("ray._private.accelerators").get_accelerator_manager_for_resource("GPU")
    count, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
    return int(count if visible is None else min(count, len(visible)))


def dashboard_error() -> str:
    """Describe the missing package of Ray's dashboard, without starting Ray; empty if all are installed."""
    error = import_module("ray._private.utils").get_dashboard_dependency_error() if is_tested() else None
    return "" if error is None else str(error)
