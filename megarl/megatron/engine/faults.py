"""Faults of a step: non-finite values, whose samples and parameters are named, and passes out of device memory.

A rank that runs out of memory leaves its pass, while its peers may wait for it in a collective. All ranks vote whether
the pass is repeated, which is possible only if no rank waits:

- Data-parallel ranks compute alone until their gradients are summed. They vote before that sum; if it overlaps with
  the backward pass, before the last micro-batch.
- Ranks that share layers or sequences (tensor, context, expert parallelism) must have left the pass between the same
  two collectives. They compare how many collectives each process group has started.
- Pipeline stages wait for each other's activations, so nothing is repeated.
"""

from __future__ import annotations

import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store, _world

from megarl.base.allocators import return_cached_memory
from megarl.base.errors import MegarlError
from megarl.megatron.runtime.process_groups import Runtime
from megarl.models.tower_class import TOWER

SHOWN = 8
"""Number of samples that a message names; the rest are counted."""
Describe = Callable[[int, int], str]
"""Names a sample by its micro-batch and its row there."""
PEERS_WAIT_S = 30.0
"""Seconds in which peers that share layers must run out of memory too; otherwise they wait in a collective."""
_PAUSE_S = 0.02
_T = TypeVar("_T")


@dataclass
class _MicroBatchRecord:
    """Loss, outputs and gradients of one micro-batch; tensors over response tokens are ``[n]``, row after row."""

    loss: Tensor
    outputs: tuple[Tensor, ...]
    rows: tuple[int, ...]  # response tokens of each
    grads: list[Tensor] = field(default_factory=list)


class FaultWatch:
    """Keeps losses, outputs and the outputs' gradients of a step until it is known whether the step is skipped.

    Nothing waits for the device before :meth:`findings`.
    """

    def __init__(self) -> None:
        self._records: list[_MicroBatchRecord] = []

    def watch(self, loss: Tensor, outputs: Iterable[object], rows: Sequence[int]) -> None:
        """Record the next micro-batch: outputs ``[response tokens, ...]`` each, and response tokens by row."""
        tensors = [output for output in outputs if isinstance(output, Tensor) and output.is_floating_point()]
        record = _MicroBatchRecord(loss.detach(), tuple(tensor.detach() for tensor in tensors), tuple(rows))

        def keep(grad: Tensor | None) -> None:
            if grad is not None:  # else the loss does not read this output
                record.grads.append(grad.detach())

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(keep)
        self._records.append(record)

    def findings(self, params: Mapping[str, nn.Parameter], describe: Describe) -> RankFaults:
        """Collect this rank's non-finite values of a skipped step.

        Args:
            params: by global name, in the order of the forward pass, with reduced gradients in ``main_grad``.
        """
        samples: dict[str, str] = {}
        largest = (0.0, "")
        for number, record in enumerate(self._records):
            bad_outputs, bad_grads = _rows_with(record.outputs, record.rows), _rows_with(record.grads, record.rows)
            samples |= {describe(number, row): "gradient of its log-probs or values" for row in bad_grads}
            samples |= {describe(number, row): "log-probs or values" for row in bad_outputs}
            if not record.loss.isfinite() and not bad_outputs + bad_grads:
                samples |= {describe(number, row): "loss of its micro-batch" for row in range(len(record.rows))}
            if not samples:
                size, row = _largest(record)
                largest = max(largest, (size, describe(number, row)))
        main_grads = {name: getattr(param, "main_grad", None) for name, param in params.items()}
        names = [name for name, grad in main_grads.items() if grad is not None and not grad.isfinite().all()]
        return RankFaults(samples, largest, names)


class RankFaults(NamedTuple):
    """Non-finite values of a skipped step on one rank.

    Attributes:
        samples: non-finite quantity by sample.
        largest: largest absolute gradient of a log-prob or value, and its sample.
        parameters: parameters with a non-finite gradient, in the order of the forward pass.
    """

    samples: dict[str, str]
    largest: tuple[float, str]
    parameters: list[str]


class SkipReport(NamedTuple):
    """Non-finite values of a skipped step over all ranks, as in :class:`RankFaults`; the same on each.

    Attributes:
        parameter: the first parameter in the backward pass with a non-finite gradient; empty if there is none.
        ranks: ranks with such a part of it.
        parameters: number of parameters with a non-finite gradient.
    """

    samples: dict[str, str]
    largest: tuple[float, str]
    parameter: str
    ranks: tuple[int, ...]
    parameters: int

    def describe(self) -> str:
        """Describe the report in two sentences."""
        if self.samples:
            named = ", ".join(f"{sample} ({quantity})" for sample, quantity in list(self.samples.items())[:SHOWN])
            more = f" and {len(self.samples) - SHOWN} more" if len(self.samples) > SHOWN else ""
            text = f"not finite for {len(self.samples)} samples: {named}{more}."
        else:
            size, sample = self.largest
            text = "every loss, log-prob and value, and their gradients, were finite"
            text += f"; the largest gradient, {size:.3g}, is that of {sample}." if sample else "."
        if not self.parameter:
            return f"{text} The gradient of every parameter is finite; their norm is not."
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        others = f", the first in the backward pass of {self.parameters} parameters" if self.parameters > 1 else ""
        return f"{text} The gradient of '{self.parameter}' is not finite on {ranks}{others}."


def skip_report(findings: RankFaults) -> SkipReport:
    """Merge the findings of all ranks; communicates."""
    all_findings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_findings, findings)
    samples: dict[str, str] = {}
    holders: dict[str, list[int]] = defaultdict(list)
    order: dict[str, tuple[int, int]] = {}
    for rank, faults in enumerate(all_findings):
        samples = faults.samples | samples
        for position, name in enumerate(faults.parameters):
            holders[name].append(rank)
            order[name] = (_depth(name), position)
    first = max(order, key=order.__getitem__, default="")
    largest = max(faults.largest for faults in all_findings)
    return SkipReport(samples, largest, first, tuple(holders.get(first, ())), len(holders))


def _rows_with(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[int]:
    """Rows with a non-finite value in some tensor."""
    bad = torch.zeros(sum(rows), dtype=torch.bool)
    for tensor in tensors:
        bad |= ~tensor.isfinite().flatten(1).all(1).cpu() if tensor.dim() > 1 else ~tensor.isfinite().cpu()
    return [row for row, part in enumerate(bad.split(list(rows))) if part.any()]


def _largest(record: _MicroBatchRecord) -> tuple[float, int]:
    """Largest absolute gradient of a micro-batch's outputs, and its row."""
    sizes = torch.zeros(sum(record.rows))
    for grad in record.grads:
        of_tokens = grad.float().abs().flatten(1).amax(1) if grad.dim() > 1 else grad.float().abs()
        sizes = torch.maximum(sizes, of_tokens.cpu())
    per_row = [float(part.max()) if len(part) else 0.0 for part in sizes.split(list(record.rows))]
    return max((size, row) for row, size in enumerate(per_row))


def _depth(name: str) -> int:
    """Position of a parameter in the forward pass: vision tower, embedding, layer by layer, output."""
    if name.startswith(TOWER):
        return -2
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2])
    return -1 if name.startswith("embedding.") else 1_000_000


class DeviceMemoryError(MegarlError):
    """A rank ran out of device memory in a pass of the model.

    Attributes:
        repeatable: all ranks raised the error and can repeat the pass. Otherwise peers may hang in a collective, and
            the process must end.
    """

    def __init__(self, message: str, *, repeatable: bool) -> None:
        super().__init__(message, code="engine.device-memory")
        self.repeatable = repeatable


class OutOfMemoryVote:
    """Lets all ranks agree after each pass whether one ran out of memory; no pass is repeated unless ``enabled``."""

    def __init__(self, runtime: Runtime, *, enabled: bool) -> None:
        self._runtime = runtime
        # Why no pass of the role can be repeated; empty if there is no reason.
        self._obstacle = "pipeline stages wait for each other" if runtime.layout.pp > 1 else ""
        if not enabled:
            self._obstacle = "trainer.repeat_out_of_memory is false"
        self._peers_wait_s = PEERS_WAIT_S
        self._has_voted = False
        self._random_states: _RandomStates

    def run(self, action: Callable[[], _T], clean_up: Callable[[], None], *, gathers_weights: bool) -> _T:
        """Run a pass; every rank of the role must call this in the same order. Communicates.

        Args:
            action: the pass; calls :meth:`agree` before peers depend on this rank, if that is before its end.
            clean_up: drops an interrupted pass's references to activations.
            gathers_weights: the pass gathers the last step's weights over data-parallel ranks, which would wait for a
                rank that left.

        Raises:
            DeviceMemoryError: a rank ran out of device memory.
        """
        self._has_voted = False
        if not self._obstacle:
            self._random_states = _RandomStates(self._runtime.device)
        try:
            result = action()
            self.agree()
            return result
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Only here, outside of the handler, no traceback keeps the activations alive.
        clean_up()
        raise self._failure(reason, gathers_weights)

    def agree(self) -> None:
        """Vote that this rank had enough memory; raises if another had not. Communicates once per pass."""
        if not self._obstacle and not self._has_voted:
            self._has_voted = True
            if self._vote(failed=False):
                self._random_states.restore()
                raise DeviceMemoryError("another rank ran out of device memory", repeatable=True)

    def _failure(self, reason: str, gathers_weights: bool) -> DeviceMemoryError:
        """Free the memory of an interrupted pass, and let all ranks leave the pass if they can; returns the error."""
        gc.collect()
        return_cached_memory()
        cause = reason.split(" If reserved but")[0].strip().rstrip(".")  # without torch's advice on fragmentation
        text = f"rank {self._runtime.rank} ran out of device memory: {cause}"
        obstacle = self._obstacle
        if not obstacle and gathers_weights:
            obstacle = "with overlap_param_gather other ranks wait for its weights"
        elif not obstacle and self._has_voted:
            obstacle = "other ranks wait for its gradients, with overlap_grad_reduce during the last micro-batch"
        elif not obstacle and not self._peers_left_alike():
            obstacle = "ranks that share its layers, sequences or experts had enough memory and wait for it"
        if obstacle:
            return DeviceMemoryError(f"{text}.\nThe pass was not repeated: {obstacle}.", repeatable=False)
        self._vote(failed=True)
        self._random_states.restore()
        return DeviceMemoryError(text, repeatable=True)

    def _vote(self, *, failed: bool) -> bool:
        votes = torch.tensor(float(failed), device=self._runtime.device)
        if self._runtime.layout.world_size > 1:
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def _peers_left_alike(self) -> bool:
        """Whether the ranks that this pass communicates with have left it as well, between the same collectives."""
        layout, own_rank, dp = self._runtime.layout, self._runtime.rank, self._runtime.coordinate.dp
        # Experts are shared across data-parallel ranks.
        peers = [r for r in range(layout.world_size) if layout.ep > 1 or layout.coordinate(r).dp == dp]
        peers.remove(own_rank)
        if not peers:
            return True
        own = {group.group_name: _collectives(group) for group in _world.pg_map}
        # Each pass ends with a collective of all ranks, the vote: their number identifies the pass.
        store, prefix = _get_default_store(), f"megarl/out_of_memory/{_collectives(dist.group.WORLD)}"
        store.set(f"{prefix}/{own_rank}", json.dumps(own))
        keys, end = [f"{prefix}/{rank}" for rank in peers], time.monotonic() + self._peers_wait_s
        while not store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        others = [json.loads(store.get(key)) for key in keys]
        return all(own[name] == other[name] for other in others for name in own.keys() & other.keys())


def _collectives(group: Any) -> int:
    """Number of collectives that this rank has started in a process group."""
    count: int = group._get_sequence_number_for_group()
    return count


class _RandomStates:
    """States of the generators that a pass may use; saved at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._megatron: dict[str, Any] = get_cuda_rng_tracker().get_states()

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        get_cuda_rng_tracker().set_states(self._megatron)
