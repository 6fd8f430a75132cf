"""Log-probabilities, entropy and KL from logits whose vocabulary is split over tensor-parallel ranks.

No rank sees another's logits: a few numbers per token are reduced over the group, the maximum first. With :math:`z` the
logits over the temperature, :math:`m = \\max z`, :math:`S = \\sum_j e^{z_j - m}` and :math:`p = e^{z - m} / S`:

- :math:`\\log p_t = z_t - m - \\log S`, with gradient :math:`1_{j=t} - p_j`;
- :math:`H = \\log S - \\sum_j p_j (z_j - m)`, with gradient :math:`-p_j (\\log p_j + H)`;
- :math:`KL = \\sum_j p_j (\\log p_j - \\log q_j)` to the reference's distribution :math:`q`, with gradient :math:`p_j
  (\\log p_j - \\log q_j - KL)` with respect to the policy's logits over the temperature, and none to the reference's.

For the KL only the reference's final hidden states travel, which are much smaller than its distributions; its output
layer recomputes the logits, micro-batch by micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REF_HIDDEN = "ref_hidden"
"""Column of a micro-batch: the reference's final hidden state that predicts each response token."""


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute each target's log-probability, the entropy of its distribution in nats, and whether it is the most likely
    token.

    Args:
        logits: ``[n, padded vocabulary / group size]``, this rank's columns, in any float format.
        targets: ``[n]`` int64 token ids below ``vocab_size``, the same on every rank.
        vocab_size: real size of the vocabulary; later columns are padding and get no probability.
        temperature: divisor of the logits; must be positive.
        with_entropy: also compute the entropy.
        group: the ranks that hold the other columns; None if this rank holds them all.

    Returns:
        Log-probabilities ``[n]`` float32, entropies ``[n]`` float32 or None, and bool ``[n]``: no token has a higher
        probability than the target. Equal on all ranks of the group. The first two are differentiable: a rank's
        backward gives the gradient of its columns.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive")
    log_probs, entropy, leads = _LogProbs.apply(logits, targets, vocab_size, temperature, with_entropy, group)
    return log_probs, entropy, leads


class _LogProbs(torch.autograd.Function):
    """Saves the probabilities for the backward; computes in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        width = logits.shape[-1]
        first = width * (group.rank() if group is not None else 0)
        real = real_columns(logits, vocab_size, group)
        shifted = logits[:, :real].float()
        maximum = shifted.amax(-1) if real else torch.full_like(targets, float("-inf"), dtype=torch.float32)
        _all_reduce(maximum, dist.ReduceOp.MAX, group)
        shifted = shifted - maximum[:, None]
        if temperature != 1:
            shifted /= temperature
        column = (targets - first).clamp(0, max(real - 1, 0))
        is_local = (targets >= first) & (targets < first + real)
        sums = shifted.new_zeros(3 if with_entropy else 2, len(targets))
        if real:
            sums[0] = shifted.gather(1, column[:, None])[:, 0] * is_local
        probs = shifted.exp() if with_entropy else shifted.exp_()
        sums[1] = probs.sum(-1)
        if with_entropy:
            sums[2] = torch.linalg.vecdot(probs, shifted)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = sums[1].log()
        if ctx.needs_input_grad[0]:
            probs /= sums[1][:, None]
        log_probs = sums[0] - log_total
        entropy = log_total - sums[2] / sums[1] if with_entropy else None
        leads = sums[0] == 0  # the distance to the largest logit
        ctx.mark_non_differentiable(leads)
        ctx.save_for_backward(probs, column, is_local, entropy)
        ctx.temperature, ctx.width, ctx.dtype = temperature, width, logits.dtype
        ctx.set_materialize_grads(False)
        return log_probs, entropy, leads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy, _ = grads
        probs, column, is_local, entropy = ctx.saved_tensors
        n, real = probs.shape
        grad = probs.new_empty(n, ctx.width)
        grad[:, real:] = 0
        inner = grad[:, :real]
        if grad_log_probs is None or not real:
            inner.zero_()
        else:
            slope = grad_log_probs / ctx.temperature
            torch.mul(probs, -slope[:, None], out=inner)
            inner.scatter_add_(1, column[:, None], (slope * is_local)[:, None])
        if grad_entropy is not None:
            slope = torch.xlogy(probs, probs) + probs * entropy[:, None]
            inner.addcmul_(slope, (grad_entropy / ctx.temperature)[:, None], value=-1)
        return grad.to(ctx.dtype), None, None, None, None, None


def real_columns(logits: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> int:
    """Number of this rank's columns that are in the vocabulary, not padding; they come first."""
    width = logits.shape[-1]
    return min(max(vocab_size - width * (group.rank() if group is not None else 0), 0), width)


def _all_reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    """Reduce a tensor in place over a group of several ranks; communicates."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)


def vocab_parallel_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute ``KL(policy || reference)`` in nats at each position, over the whole vocabulary.

    Args:
        logits: ``[n, padded vocabulary / group size]``, this rank's columns, in any float format.
        ref_logits: the same of the reference.
        vocab_size: real size of the vocabulary; later columns are padding and get no probability.
        temperature: divisor of both logits; must be positive.
        group: the ranks that hold the other columns; None if this rank holds them all.

    Returns:
        ``[n]`` float32, equal on all ranks of the group. Differentiable with respect to ``logits``: a rank's backward
        gives the gradient of its columns.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive")
    result: Tensor = _FullKL.apply(logits, ref_logits, vocab_size, temperature, group)
    return result


class _FullKL(torch.autograd.Function):
    """Saves the probabilities and the log-ratios for the backward; computes in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        real = real_columns(logits, vocab_size, group)
        log_p = _log_softmax(logits[:, :real], temperature, group)
        log_ratio = log_p - _log_softmax(ref_logits[:, :real], temperature, group)
        probs = log_p.exp_()
        kl: Tensor = torch.linalg.vecdot(probs, log_ratio)
        _all_reduce(kl, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(probs, log_ratio, kl)
        ctx.temperature, ctx.width, ctx.dtype = temperature, logits.shape[-1], logits.dtype
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs, log_ratio, kl = ctx.saved_tensors
        grad = probs.new_zeros(len(probs), ctx.width)
        torch.mul(probs, log_ratio - kl[:, None], out=grad[:, : probs.shape[1]])
        grad *= (grads[0] / ctx.temperature)[:, None]
        return grad.to(ctx.dtype), None, None, None, None


def _log_softmax(logits: Tensor, temperature: float, group: dist.ProcessGroup | None) -> Tensor:
    """Log-probabilities of this rank's real columns, ``[n, columns]`` float32."""
    shifted = logits.float()
    maximum = shifted.amax(-1) if shifted.shape[1] else shifted.new_full((len(shifted),), float("-inf"))
    _all_reduce(maximum, dist.ReduceOp.MAX, group)
    shifted = (shifted - maximum[:, None]) / temperature
    total = shifted.exp().sum(-1)
    _all_reduce(total, dist.ReduceOp.SUM, group)
    return shifted.sub_(total.log()[:, None])
