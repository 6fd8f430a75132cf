"""Low-rank adapters (LoRA) on Megatron's parallel linear layers, and weights with the adapters merged into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
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

from megarl.megatron.runtime import Runtime
from megarl.models.adapters import A, AdapterMap, B, LocalAdapter


class LowRankAdapter(nn.Module):
    """The adapters of one parallel linear layer: ``scale * B A x`` is added to the layer's output.

    A column-parallel layer has a whole A and its rows of B; a row-parallel layer its columns of A and a whole B. Under
    sequence parallelism the whole matrix sees a part of the tokens: the mark on it makes Megatron sum its gradients.

    Args:
        local: the rank's shards.
        linear: the layer.
        initial_a: initial values of A.
        scale: factor of the output.
    """

    def __init__(self, local: LocalAdapter, linear: Any, initial_a: Tensor, scale: float) -> None:
        super().__init__()
        weight = linear.weight
        self.scale = scale
        self.enabled = True
        self.splits_inputs = not hasattr(linear, "output_size_per_partition")
        self.group = linear.tp_group
        self.sequence_parallel = linear.sequence_parallel
        self._rows_of_layer = weight.shape[0]
        self.a = nn.Parameter(initial_a.to(weight))
        self.b = nn.Parameter(weight.new_zeros(local.b.shape))
        adapters = len(self.a) // self.b.shape[1]
        self.rows: Tensor
        self.owned: Tensor | None
        rows, owners = (torch.tensor(numbers, device=weight.device) for numbers in (local.rows, local.owners))
        owned = F.one_hot(owners, adapters).to(weight) if adapters > 1 else None
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("owned", owned, persistent=False)
        split, whole, dim = (self.a, self.b, 1) if self.splits_inputs else (self.b, self.a, 0)
        set_tensor_model_parallel_attributes(split, True, dim, 1)
        setattr(whole, "sequence_parallel", self.sequence_parallel)  # noqa: B010  (Megatron's mark)

    def spread_b(self) -> Tensor:
        """B ``[rows, adapters * rank]``: each row in the columns of its adapter, zero elsewhere."""
        if self.owned is None:
            return self.b
        return (self.owned[:, :, None] * self.b[:, None, :]).flatten(1)

    def forward(self, inputs: Tensor) -> Tensor:
        """The adapters' part of the layer's output, ``[tokens, 1, rows]``."""
        low = F.linear(inputs, self.a)
        if self.splits_inputs:
            reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else None
            low = (reduce or reduce_from_tensor_model_parallel_region)(low, group=self.group)
        elif self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.group)
        result: Tensor = F.linear(low, self.spread_b()) * self.scale
        if len(self.rows) == self._rows_of_layer:
            return result
        return result.new_zeros(*result.shape[:-1], self._rows_of_layer).index_copy(-1, self.rows, result)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """A copy of the layer's weight plus ``scale * B A``, summed in float32 and rounded once."""
        result = weight.detach().float().clone()
        result.index_add_(0, self.rows, self.spread_b().float() @ self.a.float(), alpha=self.scale)
        return result.to(weight.dtype)


class Adapters:
    """All adapters of a pipeline stage.

    Args:
        layers: the adapter of each adapted weight, by the weight's name in the weight map.
    """

    def __init__(self, layers: Mapping[str, LowRankAdapter]) -> None:
        self._layers = layers

    def parameters(self) -> dict[str, nn.Parameter]:
        """A and B of every adapted layer, by their names in :class:`~megarl.models.adapters.AdapterMap`."""
        found: dict[str, nn.Parameter] = {}
        for weight, layer in self._layers.items():
            name = weight.removesuffix(".weight")
            found |= {f"{name}.{A}": layer.a, f"{name}.{B}": layer.b}
        return found

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Scope in which the model computes without adapters."""
        for layer in self._layers.values():
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enabled = True

    def merged(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """View of the weights with adapters merged into them, one weight at a time."""
        return _MergedWeights(weights, self._layers)


class _MergedWeights(Mapping[str, Tensor]):
    """Merges a weight when it is read, and keeps the last one: several slices of it are read in a row."""

    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, LowRankAdapter]) -> None:
        self._weights, self._layers = weights, layers
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        layer = self._layers.get(name)
        if layer is None:
            return self._weights[name]
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, layer.merged(self._weights[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def add_adapters(chunks: Sequence[GPTModel], adapter_map: AdapterMap, runtime: Runtime) -> Adapters:
    """Freeze the model and add its adapters; before the modules are wrapped for data parallelism.

    Args:
        chunks: modules of this stage, with Megatron's torch layers.
        adapter_map: the adapters.
        runtime: this rank's process groups.
    """
    local = {adapter.weight: adapter for adapter in adapter_map.adapters(runtime.layout, runtime.rank)}
    layers = {}
    for chunk in chunks:
        chunk.requires_grad_(False)
        for decoder_layer in chunk.decoder.layers:
            prefix = f"decoder.layers.{decoder_layer.layer_number - 1}"
            for name, linear in list(decoder_layer.named_modules()):
                adapter = local.get(f"{prefix}.{name}.weight")
                if adapter is not None:
                    initial = adapter_map.initial_a(adapter.a)
                    layers[adapter.weight] = LowRankAdapter(adapter, linear, initial, adapter_map.options.scale)
                    linear.lora = layers[adapter.weight]
                    linear.register_forward_hook(_add_output)
        if chunk.pre_process:
            # A recomputed layer has gradients only if its input does.
            chunk.embedding.register_forward_hook(_require_grad)
    assert layers.keys() == local.keys(), "every adapted layer of the stage is a module of its chunks"
    return Adapters(layers)


def _add_output(linear: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    adapter: LowRankAdapter = linear.lora
    return (output[0] + adapter(args[0]), output[1]) if adapter.enabled else None


def _require_grad(_: Any, __: Any, embedded: Tensor) -> Tensor | None:
    return embedded.requires_grad_() if torch.is_grad_enabled() else None
