"""Diagnosis of skipped steps: samples and parameters with non-finite values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

SHOWN = 8
"""Number of samples that a message names; the rest are counted."""

Describe = Callable[[int, int], str]
"""Names a sample by its micro-batch and its row there."""


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
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(_keep, record.grads))
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
        names = [name for name, param in params.items() if not _finite(getattr(param, "main_grad", None))]
        return RankFaults(samples, largest, names)


class RankFaults(NamedTuple):
    """Non-finite values of a skipped step on one rank.

    Attributes:
        samples: non-finite quantity, by the sample's description.
        largest: largest absolute gradient of a log-prob or value, and its sample.
        parameters: parameters with a non-finite gradient, in the order of the forward pass.
    """

    samples: dict[str, str]
    largest: tuple[float, str]
    parameters: list[str]


class SkipReport(NamedTuple):
    """Non-finite values of a skipped step over all ranks; the same on each.

    Attributes:
        largest: largest absolute gradient of a log-prob or value, and its sample; used if ``samples`` is empty.
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
            shown = [f"{sample} ({quantity})" for sample, quantity in list(self.samples.items())[:SHOWN]]
            rest = len(self.samples) - len(shown)
            text = (
                f"not finite for {len(self.samples)} samples: {', '.join(shown)}{f' and {rest} more' if rest else ''}."
            )
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


def _keep(grads: list[Tensor], grad: Tensor | None) -> None:
    if grad is not None:  # the loss does not read this output
        grads.append(grad.detach())


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


def _finite(grad: Tensor | None) -> bool:
    return grad is None or bool(grad.isfinite().all())


def _depth(name: str) -> int:
    """Position of a parameter in the forward pass: embedding, layer by layer, output."""
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2])
    return -1 if name.startswith("embedding.") else 1_000_000
