"""One network device of gloo for all process groups of a process.

By default each group creates its own: a listening socket and a thread that wakes up a hundred times a second. Megatron
creates more than fifteen groups per process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

_torch: Any = distributed_c10d
_gloo: Any = ProcessGroupGloo  # torch's type stubs lack its options
_INTERFACE = "GLOO_SOCKET_IFNAME"
_devices: dict[str | None, Any] = {}


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Let the gloo groups created in the context share this process's device."""
    _torch.ProcessGroupGloo = _OnSharedDevice
    try:
        yield
    finally:
        _torch.ProcessGroupGloo = _gloo


class _AnyGloo(type):
    """torch asks whether a group is an instance of the class that creates them."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)


class _OnSharedDevice(metaclass=_AnyGloo):
    """Stands for ``ProcessGroupGloo`` while torch creates a group."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = _gloo._Options()
        options._devices = [_device()]
        options._timeout = timeout
        return _gloo(store, rank, size, options)


def _device() -> Any:
    """Return the device of the network interface that the environment names; torch reads it for each group.

    Groups connect when they are created, also with ``TORCH_GLOO_LAZY_INIT=1``: groups that share a device and connect
    at their first call hang (torch 2.13, all-reduce over Megatron's embedding group).
    """
    interface = os.environ.get(_INTERFACE)
    if interface not in _devices:
        _devices[interface] = _gloo.create_default_device(lazy_init=False)
    return _devices[interface]
