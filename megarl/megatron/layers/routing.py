"""State of the routers during a pass: real tokens, expert loads, losses that balance experts, and routing replay.

The engine announces each micro-batch before its forward pass. A router of a recomputed layer keeps the micro-batches
whose backward is due, in a queue: activation recomputation sees the same tokens and the same routes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.megatron.layers.context_parallel import padded_lengths, rank_indices
from megarl.megatron.layers.packed import PackedMicroBatch, copy_to, ranges
from megarl.megatron.runtime.process_groups import Runtime
from megarl.models.functional import score_experts
from megarl.models.model_config import Experts

NO_ROUTE = -1
"""Entry of a route for a token without a recorded one: the router selects its experts."""


@dataclass(frozen=True)
class RoutedTokens:
    """This rank's tokens of a micro-batch, as its routers see them.

    Under sequence parallelism a router has one part of the tokens of its context-parallel rank.

    Attributes:
        copies: ``[tokens]`` float32, number of sequences with the token: 0 for padding, above 1 in a shared beginning.
        members: ``[2, pairs]`` int64: a token and the index of a sequence that contains it.
        lengths: ``[sequences]`` float32, tokens of each whole sequence.
        routes: ``[tokens, expert layers, per token]`` int64, experts to replay, or :data:`NO_ROUTE`; None without
            routing replay.
    """

    copies: Tensor
    members: Tensor
    lengths: Tensor
    routes: Tensor | None

    @classmethod
    def of(cls, micro_batch: PackedMicroBatch, runtime: Runtime, multiple: int) -> RoutedTokens:
        """Cut out this rank's tokens, on its device."""
        device, stored = runtime.device, local_indices(micro_batch, runtime, multiple)
        local = torch.full((micro_batch.num_tokens,), -1)
        local[stored[stored >= 0]] = (stored >= 0).nonzero()[:, 0]
        lengths = torch.tensor(micro_batch.lengths)
        tokens = local if micro_batch.shared is None else local[micro_batch.shared.spread]
        members = torch.stack([tokens, torch.arange(len(lengths)).repeat_interleave(lengths)])[:, tokens >= 0]
        routes = micro_batch.routes
        if routes is not None:
            routes = routes[stored].long().masked_fill((stored < 0)[:, None, None], NO_ROUTE)
        return cls(
            copies=copy_to(members[0].bincount(minlength=len(stored)).float(), device),
            members=copy_to(members, device),
            lengths=copy_to(lengths.float(), device),
            routes=None if routes is None else copy_to(routes, device),
        )


class _AddedLoss(torch.autograd.Function):
    """Passes values through and adds a loss to the backward pass, with a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


@dataclass(frozen=True)
class BalanceLosses:
    """Losses on a router's logits, with Megatron's names and definitions.

    Both are means over a mini-batch, whatever its division into micro-batches and ranks.

    Attributes:
        aux_coeff: weight of ``seq_aux_loss`` (https://arxiv.org/abs/2412.19437, sequence-wise balance loss).
        z_coeff: weight of the z-loss (https://arxiv.org/abs/2202.08906).
    """

    aux_coeff: float
    z_coeff: float

    def __bool__(self) -> bool:
        return self.aux_coeff > 0 or self.z_coeff > 0


@dataclass(frozen=True)
class RoutingPass:
    """One run of the schedule over micro-batches.

    Attributes:
        sequences: sequences of the mini-batch over all data-parallel ranks, and ``tokens``; for :class:`BalanceLosses`.
    """

    trains: bool = False
    records: bool = False
    sequences: float = 1.0
    tokens: float = 1.0


INFERENCE = RoutingPass()


@dataclass
class RouterState:
    """State of one router during a pass.

    Attributes:
        layer: index among the model's layers with experts.
        load: ``[experts]`` float64, tokens sent to each expert by this rank in the pass.
        losses: ``[2]`` float64, this rank's share of sequence-wise balance loss and z-loss, without their weights.
        routes: experts of each token, ``[tokens, per token]``, by micro-batch; filled by a pass that records.
        due: micro-batches of a recomputed layer whose backward has not begun.
    """

    layer: int
    shared: Routing
    load: Tensor
    losses: Tensor
    routes: list[Tensor] = field(default_factory=list)
    due: deque[RoutedTokens] = field(default_factory=deque)

    def clear(self) -> None:
        """Begin a pass."""
        self.load.zero_()
        self.losses.zero_()
        self.routes.clear()
        self.due.clear()

    def next_tokens(self) -> tuple[RoutedTokens | None, bool]:
        """Return the tokens of the router's current call, and whether it recomputes an earlier one.

        A checkpointed layer computes its forward without gradients, and again with gradients when its backward begins.
        A chunk's backward passes follow the order of its forward passes.
        """
        current = self.shared.current
        if self.shared.run.trains and current is not None:
            if not torch.is_grad_enabled():
                self.due.append(current)
            elif self.due:
                return self.due.popleft(), True
        return current, False

    def replayed(self, tokens: RoutedTokens | None, chosen: Tensor) -> Tensor:
        """Return the experts of each token: the recorded ones, else those ``chosen`` now."""
        if tokens is None or tokens.routes is None:
            return chosen
        routes = tokens.routes[:, self.layer]
        return torch.where(routes == NO_ROUTE, chosen, routes)

    @torch.no_grad()
    def count(self, tokens: RoutedTokens, routing_map: Tensor, chosen: Tensor) -> None:
        """Count the tokens of each expert, in a pass that trains, and record routes, in one that records."""
        if self.shared.run.trains:
            self.load += tokens.copies.double() @ routing_map.double()
        if self.shared.run.records:
            self.routes.append(chosen)

    def balanced(self, values: Tensor, logits: Tensor, tokens: RoutedTokens, *, first: bool) -> Tensor:
        """Attach :class:`BalanceLosses` of a router's ``logits`` to ``values``; communicates.

        Args:
            logits: ``[tokens, experts]`` float32.
            first: count the losses in the metrics: this is not a recomputation.
        """
        weights, run = self.shared.balance, self.shared.run
        z_loss = (tokens.copies * logits.logsumexp(-1).square()).sum() / run.tokens
        aux_loss = z_loss.new_zeros(())
        if weights.aux_coeff:
            aux_loss = self._sequence_loss(logits, tokens) / run.sequences
        if first:
            self.losses += torch.stack([aux_loss, z_loss]).detach().double()
        if not torch.is_grad_enabled():
            return values
        result: Tensor = _AddedLoss.apply(values, weights.aux_coeff * aux_loss + weights.z_coeff * z_loss)
        return result

    def _sequence_loss(self, logits: Tensor, tokens: RoutedTokens) -> Tensor:
        """This rank's share of the sum of the sequences' balance losses."""
        experts = self.shared.experts
        scores = score_experts(logits, experts)
        if experts.score != "softmax":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        best = torch.zeros_like(scores).scatter(1, scores.topk(experts.per_token, dim=-1).indices, 1.0)
        shape, (members, sequences) = (len(tokens.lengths), experts.count), tokens.members
        counts = scores.new_zeros(shape).index_add(0, sequences, best[members])
        if self.shared.sharers.size() > 1:
            dist.all_reduce(counts, group=self.shared.sharers)
        sums = scores.new_zeros(shape).index_add(0, sequences, scores[members])
        factors = experts.count / (experts.per_token * tokens.lengths.square())
        return (factors * (counts * sums).sum(-1)).sum()


class Routing:
    """The routers of a rank, and their state during a pass.

    Args:
        chunks: unwrapped modules of this rank's chunks of layers.

    Attributes:
        current: tokens of the micro-batch whose forward pass runs.
        sharers: ranks that divide the tokens of a sequence.
    """

    def __init__(self, chunks: Sequence[Any], experts: Experts, num_layers: int, runtime: Runtime) -> None:
        self.experts = experts
        self.runtime = runtime
        config = chunks[0].config
        aux_coeff = config.moe_aux_loss_coeff if config.moe_router_load_balancing_type == "seq_aux_loss" else 0.0
        self.balance = BalanceLosses(float(aux_coeff), config.moe_z_loss_coeff or 0.0)
        self.bias_rate = float(config.moe_router_bias_update_rate)
        self.run = INFERENCE
        self.current: RoutedTokens | None = None
        self.sharers: dist.ProcessGroup = parallel_state.get_tensor_and_context_parallel_group()
        self._multiple = config.tensor_model_parallel_size
        self._routers: list[Any] = []
        numbers = [sum(experts.layers[:layer]) for layer in range(num_layers)]
        for number, chunk in enumerate(chunks):
            for layer, module in zip(
                runtime.layout.layers(num_layers, runtime.coordinate.pp, number), chunk.decoder.layers, strict=True
            ):
                if experts.layers[layer]:
                    zeros = torch.zeros(experts.count, dtype=torch.float64, device=runtime.device)
                    module.mlp.router.state = RouterState(numbers[layer], self, zeros, zeros.new_zeros(2))
                    self._routers.append(module.mlp.router)

    def begin(self, run: RoutingPass) -> None:
        """Begin a pass, or repeat one."""
        self.run, self.current = run, None
        for router in self._routers:
            router.state.clear()

    def load(self, micro_batch: PackedMicroBatch) -> RoutedTokens:
        """Copy this rank's tokens of a micro-batch to the device."""
        return RoutedTokens.of(micro_batch, self.runtime, self._multiple)

    def sums(self) -> tuple[Tensor, dict[str, float]]:
        """Sum the pass over all ranks: each expert's tokens, ``[expert layers, experts]``, and metrics. Communicates.

        Metrics per layer and model are the load of the busiest expert, experts without a token, and the losses.
        """
        layers = sum(self.experts.layers)
        table = torch.zeros(layers, self.experts.count + 2, dtype=torch.float64, device=self.runtime.device)
        for router in self._routers:
            state: RouterState = router.state
            table[state.layer] = torch.cat([state.load, state.losses])
        dist.all_reduce(table)
        load, aux_loss, z_loss = table[:, :-2], table[:, -2], table[:, -1]
        busiest, dead = load.amax(-1) / load.mean(-1).clamp(min=1), (load == 0).sum(-1)
        metrics = {"expert_load/max_over_mean": busiest.max().item(), "expert_load/dead": float(dead.sum())}
        for layer, (ratio, count) in enumerate(zip(busiest.tolist(), dead.tolist(), strict=True)):
            metrics[f"expert_load/max_over_mean/layer_{layer}"] = ratio
            metrics[f"expert_load/dead/layer_{layer}"] = float(count)
        if self.balance.aux_coeff:
            metrics["seq_load_balancing_loss"] = aux_loss.mean().item()
        if self.balance.z_coeff:
            metrics["z_loss"] = z_loss.mean().item()
        return load, metrics

    @torch.no_grad()
    def update_biases(self, load: Tensor) -> None:
        """Raise the correction bias of experts below the mean load and lower that of the others by the update rate.

        Args:
            load: ``[expert layers, experts]``, of the whole mini-batch.
        """
        for router in self._routers if self.bias_rate else ():
            counts = load[router.state.layer]
            router.expert_bias += self.bias_rate * (counts.mean() - counts).sign().float()

    def recorded(self, micro_batches: Sequence[PackedMicroBatch]) -> list[Tensor]:
        """Gather the routes of the pass from all ranks that share the sequences; communicates.

        Returns:
            ``[tokens, expert layers, per token]`` int16 per micro-batch, in host memory, on every rank.
        """
        results = []
        for number, micro_batch in enumerate(micro_batches):
            shape = (micro_batch.num_tokens, sum(self.experts.layers), self.experts.per_token)
            routes = torch.zeros(shape, dtype=torch.int32, device=self.runtime.device)
            stored = copy_to(local_indices(micro_batch, self.runtime, self._multiple), self.runtime.device)
            for router in self._routers:
                routes[stored[stored >= 0], router.state.layer] = router.state.routes[number][stored >= 0].int()
            for group in (self.sharers, self.runtime.pp_group):
                if group.size() > 1:
                    dist.all_reduce(routes, group=group)
            results.append(routes.to("cpu", torch.int16))
        self.begin(INFERENCE)  # frees the routers' copies
        return results


def local_indices(micro_batch: PackedMicroBatch, runtime: Runtime, multiple: int) -> Tensor:
    """Return the micro-batch index of each token of this rank's routers; -1 for padding."""
    where, ranks, count = runtime.coordinate, runtime.layout.cp, micro_batch.num_tokens
    if micro_batch.shared is not None:
        indices = torch.cat([torch.arange(count), torch.full((-count % multiple,), -1)])
    else:
        lengths = padded_lengths(micro_batch.lengths, ranks, multiple)
        padded = torch.full((sum(lengths),), -1)
        starts = accumulate(lengths[: len(micro_batch.lengths) - 1], initial=0)
        padded[ranges([*starts], micro_batch.lengths)] = torch.arange(count)
        indices = padded[rank_indices(lengths, ranks, where.cp)]
    return indices.chunk(multiple)[where.tp % multiple]
