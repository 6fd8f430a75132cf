"""Runs unmodified Megatron-Core on a machine without CUDA.

Megatron names the device ``cuda`` literally in a few places and calls ``torch.cuda`` in others. Two things bridge that:

- :func:`install` puts functions that do the same on the CPU where ``torch.cuda`` could only raise;
- :func:`active` is a scope in which torch reads every device ``cuda`` as ``cpu``. It uses a ``TorchFunctionMode``,
  which belongs to a thread, so each entry point of the engine opens the scope in whatever thread it runs.

Where nothing was installed (a process that computes on CUDA) the scope does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.megatron.gloo import gather_uneven, reduce_scatter_uneven

_CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_installed = False
_thread = threading.local()


class _NoStream:
    """Stands in for a CUDA stream and its events: on a CPU everything has happened when the call returns."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _NoStream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


_NO_STREAM = _NoStream()

REPLACED: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "manual_seed": torch.manual_seed,
    "current_stream": lambda device=None: _NO_STREAM,
    "stream": lambda stream: contextlib.nullcontext(),
}
"""What stands in for functions of ``torch.cuda``, by name."""


class _ReadCudaAsCpu(TorchFunctionMode):
    """Replaces the device ``cuda`` in the arguments of torch calls; makes ``Tensor.type()`` answer as on CUDA.

    The latter is how Megatron's optimizer tells half precision from single.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if any(_is_cuda(arg) for arg in args):
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    kind = type(value)
    return (kind is str and value.startswith("cuda")) or (kind is torch.device and value.type == "cuda")


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Scope in which torch reads ``cuda`` as ``cpu`` in this thread, once :func:`install` ran; may be nested."""
    if not _installed or getattr(_thread, "active", False):
        yield
        return
    _thread.active = True
    try:
        with _ReadCudaAsCpu():
            yield
    finally:
        _thread.active = False


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Scope for importing Megatron, in which ``torch.compile`` leaves functions as they are if there is no CUDA.

    Megatron compiles its fusions while it is imported. Without CUDA they are off, and loading the compiler for them
    would take each process seconds.
    """
    compiler = torch.compile
    if not torch.cuda.is_available():
        setattr(torch, "compile", lambda function: function)  # noqa: B010  (mypy refuses the assignment)
    try:
        yield
    finally:
        setattr(torch, "compile", compiler)  # noqa: B010


def install() -> None:
    """Replaces the ``torch.cuda`` functions that Megatron calls, for the rest of the process.

    Raises:
        AttributeError: a Megatron release has moved the functions that keep random states.
    """
    global _installed
    if _installed:
        return
    for name, replacement in REPLACED.items():
        _replace(torch.cuda, name, replacement)
    _replace(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(rng, "_get_cuda_rng_state", lambda device=None, clone=False, graph_safe=False: torch.get_rng_state())
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    _replace(mappings, "_gather_along_first_dim", gather_uneven(mappings._gather_along_first_dim))
    _replace(
        mappings, "_reduce_scatter_along_first_dim", reduce_scatter_uneven(mappings._reduce_scatter_along_first_dim)
    )
    linear = importlib.import_module("megarl.megatron.cpu_linear").parallel_linear
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        _replace(layers, name, linear(getattr(layers, name)))
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    _replace(dispatcher, "maybe_move_tensor_to_cpu", _as_on_host)
    _replace(dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _NO_STREAM)
    _replace(rng, "_set_cuda_rng_state", lambda state, device=None, graph_safe=False: torch.set_rng_state(state))
    _installed = True


def _as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron has after it moved the sizes of its dispatch to the host: where asked for, an array."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _replace(owner: Any, name: str, replacement: Any) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner.__name__}.{name} no longer exists: this Megatron or torch needs another bridge")
    setattr(owner, name, replacement)
