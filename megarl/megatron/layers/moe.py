"""Mixture-of-experts layers: Megatron's, with a router that selects and weights experts like Hugging Face's models.

Experts have no capacity limit: every token reaches all its experts, and none is dropped. By default there is no
load-balancing loss, and DeepSeek-V3's correction bias is not updated: both would pull the policy away from its rewards.
:mod:`megarl.megatron.layers.routing` has both, and the replay of routes. The router computes in float32 in every number
format.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.megatron.layers.activations import ClampedSwiGLU, SwiGLU
from megarl.megatron.layers.lora import LowRankAdapter
from megarl.megatron.layers.routing import RouterState
from megarl.megatron.runtime.versions import submodules_of
from megarl.models import ModelConfig, ParallelLayout
from megarl.models.functional import choose_experts, score_experts, weigh_experts
from megarl.models.model_config import Experts


def expert_settings(model: ModelConfig, layout: ParallelLayout, *, grouped: bool) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` for experts; empty for a dense model.

    With experts, activations are always split by sequence over tensor-parallel ranks: Megatron would otherwise send
    every token to its experts once per rank. ``grouped``: one kernel of Transformer Engine computes a rank's experts.
    """
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(has_experts) for has_experts in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "sequence_parallel": layout.tp > 1,
    }


def expert_layer_spec(experts: Experts, *, fused: bool, grouped: bool) -> ModuleSpec:
    """Build the specification of a layer's experts, in place of its dense MLP."""
    # One by one, experts with biases have Megatron's layers: it adds a bias in place.
    fused = fused and (grouped or not experts.biases)
    spec = get_moe_module_spec(use_te=fused, num_experts=experts.count, moe_grouped_gemm=grouped)
    parts = submodules_of(spec)
    parts.router = partial(ExpertRouter, experts=experts)
    if not fused:
        for part in (parts.experts, parts.shared_experts):
            submodules_of(part).activation_func = SwiGLU
    if experts.clamped is not None:
        activation = ModuleSpec(module=ClampedSwiGLU, params={"clamped": experts.clamped})
        submodules_of(parts.experts).activation_func = activation
    if experts.biases and not fused:
        submodules_of(parts.experts).linear_fc2 = WholeOutput
    return spec


def mark_experts(module: nn.Module, layout: ParallelLayout) -> None:
    """Mark expert weights whose replicas are on other ranks than a dense weight's; before the chunk is wrapped.

    Megatron sets the mark only if experts are divided, not if expert and dense layers have different tensor-parallel
    sizes: it would sum gradients over the wrong ranks. Biases are marked like weights: Megatron would sum their
    gradients over tensor-parallel ranks, which have other tokens or experts, and count them in the gradient norm on
    the first of these ranks only.
    """
    for name, param in module.named_parameters():
        if ".mlp.experts." not in name:
            continue
        if layout.expert_tp != layout.tp:
            setattr(param, "allreduce", False)  # noqa: B010  (Megatron's mark)
        if name.rpartition(".")[2].startswith("bias"):
            setattr(param, "sequence_parallel", False)  # noqa: B010
            setattr(param, "tensor_model_parallel", True)  # noqa: B010


def drop_autograd_graphs(module: nn.Module) -> None:
    """Drop the last micro-batch's autograd graph, which Megatron's dispatchers keep, after the backward pass.

    The graph refers to the model through torch's memory, which Python's garbage collector cannot see: the model, its
    process groups and their threads would never be freed.
    """
    for layer in module.modules():
        dispatcher = getattr(layer, "token_dispatcher", None)
        for holder in () if dispatcher is None else (dispatcher, layer):
            for name, value in vars(holder).items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(holder, name, value.detach())


class WholeOutput(RowParallelLinear):
    """Output projection of an expert with a bias, which is whole on its rank; the arguments are Megatron's.

    Megatron adds the bias in place, which autograd forbids for the result of a reduction over one rank.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.explicit_expert_comm = True  # Megatron's mark of a layer without reduction


class ExpertRouter(nn.Module):
    """Selects the experts of each token, in place of Megatron's router and with its arguments.

    Attributes:
        weight: ``[experts, hidden]``, on every rank, like the biases.
        expert_bias: the correction bias, ``[experts]`` float32; never trained.
        state: loads, losses and routes of the current pass; None outside of an engine.
    """

    adds_own_adapter = True
    """The adapter is applied to the logits, in float32, rather than to the output."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, *, experts: Experts, **_: Any) -> None:
        super().__init__()
        self.experts = experts
        self.layer_number: int | None = None
        self.lora: LowRankAdapter | None = None
        self.state: RouterState | None = None
        device = torch.cuda.current_device()
        weight = torch.empty(experts.count, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros_like(weight[:, 0])) if experts.biases else None
        for param in self.parameters():
            setattr(param, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark)
        self.expert_bias: nn.Parameter | None = None
        if experts.correction_bias:
            self.expert_bias = nn.Parameter(torch.zeros(experts.count, device=device), requires_grad=False)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number, counted from 1."""
        self.layer_number = layer_number

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None, *_: Any) -> tuple[Tensor, Tensor]:
        """Compute the routing that Megatron dispatches by, from ``hidden [tokens, 1, hidden]``.

        Returns:
            Weights ``[tokens, experts]`` float32, 0 for experts that were not selected, and a mask of the others.
        """
        inputs = hidden.flatten(0, -2).float()
        logits = F.linear(inputs, self.weight.float(), None if self.bias is None else self.bias.float())
        if self.lora is not None and self.lora.enabled:
            logits = self.lora.in_float32(inputs, logits, self.weight)
        scores = score_experts(logits, self.experts)
        chosen = choose_experts(scores, self.experts, self.expert_bias)
        tokens, recomputes = (None, False) if self.state is None else self.state.next_tokens()
        if self.state is not None:
            chosen = self.state.replayed(tokens, chosen)
        routing = torch.zeros_like(logits).scatter(1, chosen, weigh_experts(scores, chosen, self.experts))
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        if self.state is not None and tokens is not None:
            if not recomputes:
                self.state.count(tokens, routing_map, chosen)
            if self.state.shared.run.trains and self.state.shared.balance:
                routing = self.state.balanced(routing, logits, tokens, first=not recomputes)
        return routing, routing_map
