"""Runs unmodified Megatron-Core on a machine without CUDA.

Megatron names the device ``cuda`` literally in a few places and calls ``torch.cuda`` in others. Two mechanisms bridge
that:

- :func:`install` replaces functions of ``torch.cuda`` that would raise by CPU equivalents. It also replaces two kinds
  of Megatron functions: collectives with parts of different sizes, which gloo rejects and experts shared by several
  ranks need, and the matrix products of parallel linear layers, which oneDNN computes faster than torch's default
  library for single precision (10 to 17 % on the measured processors).
- :func:`active` is a scope in which torch reads every device ``cuda`` as ``cpu``. It uses a ``TorchFunctionMode``,
  which belongs to a thread, so each entry point of the engine opens the scope in its thread.

If nothing was installed (a process that computes on CUDA) the scope does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_installed = False

_thread = threading.local()
LOGGING_PACKAGES = ("wandb", "tensorboard", "torch.utils.tensorboard")
"""Optional imports of Megatron that megarl does not need."""


class _NoStream:
    """Replaces a CUDA stream and its events: on a CPU every operation is complete when the call returns."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _NoStream:
        """A completed event."""
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
"""Replacements of functions of ``torch.cuda``, by name."""

ABSENT_ACCELERATORS = ("cuda", "xpu", "mtia")
"""Modules of torch whose generators every ``torch.manual_seed`` seeds, too."""


class _ReadCudaAsCpu(TorchFunctionMode):
    """Replaces the device ``cuda`` in the arguments of torch calls, and makes ``Tensor.type()`` return a CUDA type.

    Megatron's optimizer distinguishes half precision from single by that type.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        for arg in args:  # a loop: this method is part of every torch call
            if type(arg) in (str, torch.device) and _is_cuda(arg):
                args = tuple(_CPU if _is_cuda(value) else value for value in args)
                break
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    kind = type(value)
    return (kind is str and value.startswith("cuda")) or (kind is torch.device and value.type == "cuda")


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Make torch read ``cuda`` as ``cpu`` in this thread within the context, once :func:`install` ran."""
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
def lean_import() -> Iterator[None]:
    """Import Megatron without packages that only its loggers and compiled fusions use, within the context.

    Megatron imports wandb and TensorBoard if they are installed, and compiles its fusions at import. megarl logs with
    its own trackers, and without CUDA the fusions are off; loading all this costs each process seconds of CPU time.
    """
    compiler = torch.compile
    if not torch.cuda.is_available():
        setattr(torch, "compile", lambda function: function)  # noqa: B010  (mypy refuses the assignment)
    hidden = [name for name in LOGGING_PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes their import fail
    try:
        yield
    finally:
        setattr(torch, "compile", compiler)  # noqa: B010
        for name in hidden:
            sys.modules.pop(name, None)


def install() -> None:
    """Replace the ``torch.cuda`` functions that Megatron calls, for the rest of the process.

    Raises:
        AttributeError: a Megatron release has moved a function to replace.
    """
    global _installed
    if _installed:
        return
    for name, replacement in REPLACED.items():
        _replace(torch.cuda, name, replacement)
    for name in ABSENT_ACCELERATORS:
        # It would store the seed and the formatted stack of its call, for an initialization that never comes.
        if hasattr(torch, name):
            _replace(getattr(torch, name), "manual_seed_all", lambda seed: None)
    _replace(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(rng, "_get_cuda_rng_state", lambda device=None, clone=False, graph_safe=False: torch.get_rng_state())
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    _replace(mappings, "_gather_along_first_dim", gather_uneven(mappings._gather_along_first_dim))
    _replace(
        mappings, "_reduce_scatter_along_first_dim", reduce_scatter_uneven(mappings._reduce_scatter_along_first_dim)
    )
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        _replace(layers, name, parallel_linear(getattr(layers, name)))
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    _replace(dispatcher, "maybe_move_tensor_to_cpu", _as_on_host)
    _replace(dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _NO_STREAM)
    _replace(rng, "_set_cuda_rng_state", lambda state, device=None, graph_safe=False: torch.set_rng_state(state))
    _installed = True


def _as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's conversion of dispatch sizes on the host: an array if requested."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _replace(owner: Any, name: str, replacement: Any) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner.__name__}.{name} no longer exists: this Megatron or torch needs another bridge")
    setattr(owner, name, replacement)


def gather_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend Megatron's gather along the first dimension (``even``) to parts of different sizes."""

    def gather(
        part: Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        """Concatenate the parts of all ranks; communicates."""
        if output_split_sizes is None or group.size() == 1:
            return even(part, group, output_split_sizes, *more, **options)
        padded = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([whole[:size] for whole, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def reduce_scatter_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend Megatron's reduce-scatter to parts of different sizes."""

    def reduce_scatter(
        whole: Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        """This rank's part of the sum over ranks; communicates."""
        if input_split_sizes is None or group.size() == 1:
            return even(whole, group, input_split_sizes, *more, **options)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        part: Tensor = total.split(list(input_split_sizes))[group.rank()].clone()
        return part

    return reduce_scatter


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_fast(inputs: Tensor) -> bool:
    return inputs.device.type == "cpu" and inputs.dtype is torch.float32 and inputs.numel() > 0 and _has_onednn()


def parallel_linear(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace the matrix product of Megatron's parallel layers, trainable or frozen, by oneDNN's."""

    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")

    @functools.wraps(original)  # with its attributes, which record issued warnings
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any = None,
        **rest: Any,
    ) -> Tensor:
        """``input @ weight.T + bias``; under sequence parallelism of the input gathered over the ranks."""
        if not _is_fast(input) or gradient_accumulation_fusion:
            flags = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
            return original(input, weight, bias, *flags, tp_group=tp_group, **rest)
        if sequence_parallel:
            input = mappings.gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=tp_group
            )
        elif allreduce_dgrad:
            input = mappings.copy_to_tensor_model_parallel_region(input, group=tp_group)
        result: Tensor = _Linear.apply(input, weight, bias)
        return result

    return forward


class _Linear(torch.autograd.Function):
    """The gradient of the weight uses torch's product: oneDNN would copy both transposed operands."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        to_inputs, to_weight, _ = ctx.needs_input_grad
        return (
            _product(grad, weight.t()).view_as(inputs) if to_inputs else None,
            grad.t() @ inputs.flatten(0, -2) if to_weight else None,
            grad.sum(0) if ctx.has_bias else None,
        )


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``inputs @ weight.T + bias``."""
    if not _is_fast(inputs):
        return F.linear(inputs, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result
