"""Low-rank adapters (LoRA, DoRA) on Megatron's parallel linear layers, merged weights, and names in the weight map."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional as F

from megarl.base.seeds import derive_seed
from megarl.megatron.layers.images import TOWER_MARKS
from megarl.megatron.runtime.process_groups import Runtime
from megarl.models import LocalParam, ModelConfig, canonical_name
from megarl.models.adapters import OUTPUT_LAYER, A, AdapterMap, AdapterSplit, B, LocalAdapter, M

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


class LowRankAdapter(nn.Module):
    """The adapters of one parallel linear layer: ``scale * B A x`` is added to the layer's output.

    With DoRA each row of ``W + scale * B A`` is rescaled to its magnitude in M; the layer's bias is not. As in peft, a
    row's norm is rounded to the dtype of M, and has no gradient.

    A column-parallel layer has a whole A and its rows of B and M; a row-parallel layer has its columns of A, a whole B
    and a whole M. Under sequence parallelism a whole tensor sees a part of the tokens: the mark on it makes Megatron
    sum its gradients.

    Megatron's experts and megarl's output layer do their TP communication outside the linear layer (explicit expert
    communication): each TP rank sees all tokens, and input gradients (row-parallel: outputs) are summed later.

    Args:
        sequence_parallel: the layer's inputs or outputs are split over the group by sequence.
    """

    def __init__(
        self,
        local: LocalAdapter,
        weight: nn.Parameter,
        initial_a: Tensor,
        scale: float,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        sums_outside: bool,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.enabled = True
        self.split = local.split
        self.group = group
        self.sequence_parallel = sequence_parallel
        self._share = 1 / group.size() if sums_outside else 1.0
        self._rows_of_layer = weight.shape[0]
        self.a = nn.Parameter(initial_a.to(weight))
        self.b = nn.Parameter(weight.new_zeros(local.b.shape))
        self.m = None if local.m is None else nn.Parameter(weight.new_ones(local.m.shape))
        adapters = len(self.a) // self.b.shape[1]
        self.rows: Tensor
        self.owned: Tensor | None
        rows, owners = (torch.tensor(numbers, device=weight.device) for numbers in (local.rows, local.owners))
        owned = F.one_hot(owners, adapters).to(weight) if adapters > 1 else None
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("owned", owned, persistent=False)
        self._mark(weight, local.is_expert)
        for mark in filter(partial(hasattr, weight), TOWER_MARKS):
            for param in self.parameters():
                setattr(param, mark, True)

    def _mark(self, weight: nn.Parameter, is_expert: bool) -> None:
        """Set Megatron's marks: an expert's replicas, gradients to sum, and tensors that the norm counts once."""
        dims = ((self.a, AdapterSplit.ROW, 1), (self.b, AdapterSplit.COLUMN, 0), (self.m, AdapterSplit.COLUMN, 0))
        for param, split, dim in dims:
            if param is None:
                continue
            is_whole = self.split is not split
            if is_expert:
                # Megatron finds the first copy of a whole tensor by the group of dense layers.
                set_tensor_model_parallel_attributes(param, True, dim, 1)
                setattr(param, "shared", is_whole and self.group.rank() > 0)  # noqa: B010
                setattr(param, "allreduce", getattr(weight, "allreduce", True))  # noqa: B010
            elif is_whole:
                setattr(param, "sequence_parallel", self.sequence_parallel)  # noqa: B010
            else:
                set_tensor_model_parallel_attributes(param, True, dim, 1)

    @property
    def sums_norms(self) -> bool:
        """Whether the norms of DoRA's rows are sums over the ranks that share the layer."""
        return self.m is not None and self.split is AdapterSplit.ROW and self.group.size() > 1

    def spread_b(self) -> Tensor:
        """Spread B to ``[rows, adapters * rank]``: each row in the columns of its adapter, zero elsewhere."""
        if self.owned is None:
            return self.b
        return (self.owned[:, :, None] * self.b[:, None, :]).flatten(1)

    def forward(self, inputs: Tensor, output: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the adapters to the layer's output, ``[..., rows]``."""
        return self._rescaled(output + self._added(inputs), weight, bias)

    def in_float32(self, inputs: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
        """Apply the adapter to a router's float32 logits."""
        added = F.linear(F.linear(inputs, self.a.float()), self.b.float()) * self.scale
        return self._rescaled(logits + added, weight, None)

    def factors(self, weight: Tensor) -> Tensor | None:
        """Compute DoRA's factor of each row of ``W + scale * B A``, ``[rows]`` float32; may communicate.

        Returns:
            1 for rows without an adapter; None without DoRA.
        """
        if self.m is None:
            return None
        factors = self.m.float() / self._norms(weight).float()
        if self.split is AdapterSplit.ROW and self._share != 1:
            # Each rank's output is a summand, and gives a part of the gradient.
            factors = copy_to_tensor_model_parallel_region(factors, group=self.group)
        if len(self.rows) == self._rows_of_layer:
            return factors
        return factors.new_ones(self._rows_of_layer).index_copy(0, self.rows, factors)

    @torch.no_grad()
    def reset_magnitudes(self, weight: Tensor) -> None:
        """Set the magnitudes to the norms of the rows: the adapters then have no effect; may communicate."""
        if self.m is not None:
            self.m.copy_(self._norms(weight))

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Compute the norms of ``W + scale * B A``'s adapted rows, in the dtype of M.

        The sum is not built: ``|W + s B A|^2 = |W|^2 + (2 W A^T + s B A A^T) . s B``, row by row.
        """
        a, b = self.a.float(), self.spread_b().float()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()[self.rows]
        mixed = 2 * F.linear(weight, self.a)[self.rows].float() + self.scale * b @ (a @ a.T)
        squares += self.scale * (mixed * b).sum(1)
        if self.sums_norms:
            dist.all_reduce(squares, group=self.group)
        # A row of zeros, which peft divides by, has the factor 1 until B changes it.
        norms: Tensor = squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt().to(self.b.dtype)
        return norms

    def _rescaled(self, output: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rescale an output with adapters; exact where a factor is 1."""
        factors = self.factors(weight)
        if factors is None:
            return output
        without_bias = output if bias is None else output - bias
        result: Tensor = torch.addcmul(output, without_bias, (factors - 1).to(output.dtype))
        return result

    def _added(self, inputs: Tensor) -> Tensor:
        """Compute the adapters' part of the layer's output, ``[..., rows]``."""
        if self.split is AdapterSplit.COLUMN:
            inputs = _Scaled.apply(inputs, 1.0, self._share)
        result: Tensor = F.linear(self._exchanged(F.linear(inputs, self.a)), self.spread_b()) * self.scale
        if self.split is AdapterSplit.ROW:
            result = _Scaled.apply(result, self._share, 1.0)
        if len(self.rows) == self._rows_of_layer:
            return result
        return result.new_zeros(*result.shape[:-1], self._rows_of_layer).index_copy(-1, self.rows, result)

    def _exchanged(self, low: Tensor) -> Tensor:
        """``A x`` of all tokens that this rank's part of B multiplies."""
        if self.split is AdapterSplit.REPLICATED:
            return low
        whole, by_sequence = {  # a column split has rows of B for all tokens; in a row split each rank has a summand
            AdapterSplit.COLUMN: (copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region),
            AdapterSplit.ROW: (reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region),
        }[self.split]
        result: Tensor = (by_sequence if self.sequence_parallel else whole)(low, group=self.group)
        return result

    @torch.no_grad()
    def merged(self, weight: Tensor, factors: Tensor | None) -> Tensor:
        """Return the layer's weight with the adapters merged, computed in float32 and rounded once."""
        result = weight.detach().float().clone()
        result.index_add_(0, self.rows, self.spread_b().float() @ self.a.float(), alpha=self.scale)
        if factors is not None:
            result *= factors[:, None]
        return result.to(weight.dtype)


class _Scaled(torch.autograd.Function):
    """Multiplies values by one factor and gradients by another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward_factor: float, backward_factor: float) -> Tensor:
        ctx.factor = backward_factor
        return values.view_as(values) if forward_factor == 1 else values * forward_factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] if ctx.factor == 1 else grads[0] * ctx.factor, None, None


class Adapters:
    """All adapters of a pipeline stage, and the weights that are trained in full beside them.

    Args:
        layers: the adapter of each adapted weight, by the weight's name in the weight map.
        in_full: the weights trained in full, by name.
    """

    def __init__(self, layers: Mapping[str, LowRankAdapter], in_full: Mapping[str, nn.Parameter]) -> None:
        self._layers, self._in_full = layers, in_full
        self._base: dict[str, Tensor] = {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters, by their names in :class:`~megarl.models.adapters.AdapterMap`."""
        params: dict[str, nn.Parameter] = dict(self._in_full)
        for weight, layer in self._layers.items():
            name = weight.removesuffix(".weight")
            params |= {f"{name}.{A}": layer.a, f"{name}.{B}": layer.b}
            if layer.m is not None:
                params[f"{name}.{M}"] = layer.m
        return params

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Begin at the base model, whose weights are loaded: set DoRA's magnitudes, keep what training changes.

        The magnitudes are the norms of the rows. May communicate.
        """
        self._base = {name: param.detach().to("cpu", copy=True) for name, param in self._in_full.items()}
        for name, layer in self._layers.items():
            layer.reset_magnitudes(weights[name])

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base model within the context; weights trained in full must be on the device."""
        for layer in self._layers.values():
            layer.enabled = False
        try:
            with _swapped(self._in_full, self._base):
                yield
        finally:
            for layer in self._layers.values():
                layer.enabled = True

    def copy(self) -> dict[str, Tensor]:
        """Copy the adapters, which must be on the device, to host memory, for :meth:`swapped`."""
        return {name: param.detach().to("cpu", copy=True) for name, param in self.parameters().items()}

    def swapped(self, other: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Swap in the adapters of a :meth:`copy` within the context; they must be on the device."""
        return _swapped(self.parameters(), other)

    def merged(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a view of the weights with adapters merged into them, one weight at a time; may communicate."""
        return _MergedWeights(weights, self._layers)


@contextlib.contextmanager
@torch.no_grad()
def _swapped(params: Mapping[str, nn.Parameter], other: Mapping[str, Tensor]) -> Iterator[None]:
    own = {name: param.detach().to("cpu", copy=True) for name, param in params.items()}
    try:
        for name, param in params.items():
            param.copy_(other[name])
        yield
    finally:
        for name, param in params.items():
            param.copy_(own[name])


class _MergedWeights(Mapping[str, Tensor]):
    """Merges a weight when it is read, and caches the last one, since its slices are read consecutively.

    Ranks read different weights in different orders: factors that need communication are computed first.
    """

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, LowRankAdapter]) -> None:
        self._weights, self._layers = weights, layers
        self._factors = {name: layer.factors(weights[name]) for name, layer in layers.items() if layer.sums_norms}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        layer = self._layers.get(name)
        if layer is None:
            return self._weights[name]
        if self._last is None or self._last[0] != name:
            self._last = None
            weight = self._weights[name]
            factors = self._factors[name] if layer.sums_norms else layer.factors(weight)
            self._last = name, layer.merged(weight, factors)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def add_adapters(chunks: Sequence[GPTModel], adapter_map: AdapterMap, runtime: Runtime) -> Adapters:
    """Freeze the model, except weights trained in full, and add adapters; before it is wrapped for data parallelism."""
    trained = {param.name for param in adapter_map.megatron_params(runtime.layout, runtime.rank)}
    local = {adapter.weight: adapter for adapter in adapter_map.adapters(runtime.layout, runtime.rank)}
    first = first_expert(adapter_map.model, runtime)
    layers, in_full = {}, dict[str, nn.Parameter]()
    for chunk in chunks:
        chunk.requires_grad_(False)
        rename = global_naming(chunk, first)
        in_full |= {rename(name): param for name, param in chunk.named_parameters() if rename(name) in trained}
        for name, module in list(chunk.named_modules()):
            has_weight = isinstance(getattr(module, "weight", None), nn.Parameter)
            adapter = local.get(rename(f"{name}.weight")) if has_weight else None
            if adapter is not None:
                initial = initial_a(adapter_map, adapter.a)
                layers[adapter.weight] = _adapter_of(adapter, module, initial, adapter_map.options.scale, runtime)
                module.lora = layers[adapter.weight]
                if not getattr(module, "adds_own_adapter", False):
                    module.register_forward_hook(_adapt_output)
        if chunk.pre_process:
            # A recomputed layer has gradients only if its input does.
            chunk.embedding.register_forward_hook(
                lambda _, __, embedded: embedded.requires_grad_() if torch.is_grad_enabled() else None
            )
    assert layers.keys() == local.keys(), "every adapted layer of the stage is a module of its chunks"
    for param in in_full.values():
        param.requires_grad_(True)
    return Adapters(layers, in_full)


def _adapter_of(local: LocalAdapter, layer: Any, initial: Tensor, scale: float, runtime: Runtime) -> LowRankAdapter:
    is_output, is_split = local.weight.startswith(OUTPUT_LAYER), runtime.layout.tp > 1
    by_sequence = bool(getattr(layer, "sequence_parallel", False) or getattr(layer.weight, "sequence_parallel", False))
    return LowRankAdapter(
        local,
        layer.weight,
        initial,
        scale,
        runtime.etp_group if local.is_expert else runtime.tp_group,
        sequence_parallel=by_sequence and is_split and not is_output and not local.is_expert,
        # Megatron sums the input gradients of an output layer itself unless its inputs were gathered by sequence.
        sums_outside=local.is_expert or (is_output and is_split and not layer.allreduce_dgrad),
    )


def initial_a(adapter_map: AdapterMap, param: LocalParam) -> Tensor:
    """Return a rank's initial values of A; B is zero.

    Each tensor has a seed of its own, and is drawn whole: the values do not depend on the layout.
    """
    result, options = torch.zeros(param.shape), adapter_map.options
    for piece in param.pieces:
        generator = torch.Generator().manual_seed(derive_seed(options.seed, piece.hf_name))
        rows, columns = options.rank, adapter_map.base_shapes[piece.hf_name.replace(".lora_A", "")][1]
        whole = torch.empty(rows, columns)
        if options.initial_a == "kaiming":
            bound = 1 / math.sqrt(columns)
            whole.uniform_(-bound, bound, generator=generator)
        else:  # xavier
            whole.normal_(0, math.sqrt(2 / (rows + columns)), generator=generator)
        result[piece.at[0] : piece.at[0] + rows] = whole[:, piece.start[1] : piece.stop[1]]
    return result


def _adapt_output(layer: Any, args: tuple[Tensor, ...], output: Any) -> Any:
    adapter: LowRankAdapter = layer.lora
    if not adapter.enabled:
        return None
    if isinstance(output, Tensor):
        return adapter(args[0], output, layer.weight, layer.bias if isinstance(layer, nn.Linear) else None)
    # A layer that returns no bias has added it; Transformer Engine's layers without one have an empty tensor.
    bias = layer.bias if output[1] is None and layer.bias is not None and layer.bias.numel() else None
    return adapter(args[0], output[0], layer.weight, bias), output[1]


def first_expert(model: ModelConfig, runtime: Runtime) -> int:
    """Return the index of a rank's first expert among all experts of a layer; 0 without experts."""
    if model.experts is None:
        return 0
    layout = runtime.layout
    return layout.expert_coordinate(runtime.rank).ep * (model.experts.count // layout.ep)


def global_naming(chunk: GPTModel, first_expert: int = 0) -> Callable[[str], str]:
    """Return a function from a chunk's parameter names to those of the weight map.

    A chunk numbers its layers, and the rank's experts, from 0; ``first_expert`` is the number of its first expert.
    """
    layers = [f"decoder.layers.{layer.layer_number - 1}" for layer in chunk.decoder.layers]

    def rename(name: str) -> str:
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"{layers[int(local)]}.{rest}"
        return _EXPERT.sub(lambda local: str(int(local[0]) + first_expert), canonical_name(name))

    return rename
