"""Log-probabilities, entropy and KL from logits whose vocabulary is split over tensor-parallel ranks.

No rank sees another's logits: a few numbers per token are reduced over the group, the maximum first. With :math:`z` the
logits over the temperature, :math:`m = \\max z`, :math:`S = \\sum_j e^{z_j - m}` and :math:`p = e^{z - m} / S`:

- :math:`\\log p_t = z_t - m - \\log S`, with gradient :math:`1_{j=t} - p_j`;
- :math:`H = \\log S - \\sum_j p_j (z_j - m)`, with gradient :math:`-p_j (\\log p_j + H)`;
- :math:`\\sum_j p_j^2 = \\sum_j e^{2 (z_j - m)} / S^2`, without a gradient;
- :math:`KL = \\sum_j p_j (\\log p_j - \\log q_j)` to the reference's distribution :math:`q`, with gradient :math:`p_j
  (\\log p_j - \\log q_j - KL)` with respect to the policy's logits over the temperature, and none to the reference's.

The log-probs of further tokens at a position, as a teacher's most probable ones, are computed in the same way.

A token sampled with ``top_p``, ``top_k`` or ``min_p`` comes from the distribution renormalized over its support. Logits
outside are masked before the maximum, and all outputs and gradients are those of the renormalized distribution.

With a vocabulary of 152 thousand and 16 thousand tokens, one float32 copy of the logits is 9 GiB. So forward and
backward compute in float32 on a chunk of tokens at a time (:func:`~megarl.models.partition.logits_chunk_rows`), keep
two numbers per token for the backward instead of the probabilities, and may write the gradient over the logits. For the
KL only the reference's final hidden states travel; its output layer recomputes the logits, chunk by chunk. A teacher in
distillation is a reference too, whose hidden states have another size; with several, each token has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.partition import logits_chunk_rows

TEACHER_IDS = "teacher_topk_ids"
"""Column of a micro-batch: the teacher's most probable tokens at each response token, ``[response tokens, k]``."""
REF_HIDDEN = "ref_hidden"
"""Column of a micro-batch: the reference's final hidden state that predicts each response token."""
TEACHER_HIDDEN = "teacher_hidden"
"""Column of a micro-batch: the teacher's final hidden state that predicts each response token."""
TEACHER_NUMBER = "teacher_number"
"""Column of a micro-batch: number of each response token's teacher, if there are several."""
SUPPORT = "support_ids"
"""Column of a micro-batch: the tokens that each response token was sampled from, ``[response tokens, k]``."""

_OUTSIDE = -1e30
"""Logit of a token outside the support; finite, since its product with probability 0 must be 0."""


class ReferenceHead(NamedTuple):
    """The reference's distributions, as hidden states and output layer; each token may have another reference.

    Attributes:
        hidden: final hidden states ``[n, widest hidden]``, in any float format; a narrower reference's come first.
        weights: this rank's rows of each reference's output layer, ``[padded vocabulary / group size, hidden]``; in the
            policy's layout.
        numbers: index in ``weights`` of each token's reference, ``[n]``; None with one reference.
    """

    hidden: Tensor
    weights: Sequence[Tensor]
    numbers: Tensor | None = None

    def logits(self, rows: slice, real: int) -> Tensor:
        """Compute the logits of a chunk of tokens, ``[tokens, real]``: this rank's columns without padding."""
        hidden = self.hidden[rows]
        if self.numbers is None:
            (weight,) = self.weights
            return (hidden.to(weight.dtype) @ weight.T)[:, :real]
        dtype = reduce(torch.promote_types, [weight.dtype for weight in self.weights])
        logits = torch.empty(len(hidden), real, dtype=dtype, device=hidden.device)
        for number, weight in enumerate(self.weights):
            chosen = (self.numbers[rows] == number).nonzero()[:, 0]
            states = hidden[chosen, : weight.shape[1]].to(weight.dtype)
            logits[chosen] = (states @ weight[:real].T).to(dtype)
        return logits


class TokenOutputs(NamedTuple):
    """Outputs of each target, as in ``PolicyOutputs``, ``[n]`` or ``[n, k]``; equal on all ranks of the group."""

    log_probs: Tensor
    entropy: Tensor | None
    is_argmax: Tensor
    ref_kl: Tensor | None
    ids_log_probs: Tensor | None
    sum_pi_squared: Tensor | None


def vocab_parallel_outputs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    reference: ReferenceHead | None = None,
    ids: Tensor | None = None,
    support: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    overwrite_logits: bool = False,
) -> TokenOutputs:
    """Compute log-probabilities of the targets, and optionally entropies and the exact KL to a reference.

    Differentiable in ``logits``: a rank's backward gives the gradient of its columns.

    Args:
        logits: ``[n, padded vocabulary / group size]``, this rank's columns, in any float format.
        targets: ``[n]`` int64 token ids below ``vocab_size``, the same on every rank.
        vocab_size: later columns are padding and get no probability.
        reference: compute the KL to this distribution, at the same temperature.
        ids: compute the log-probabilities of these tokens at each position, ``[n, k]`` int64, distinct and below
            ``vocab_size``, the same on every rank.
        support: renormalize the distribution of each position over these tokens, ``[n, k]`` int64, the same on every
            rank; -1 = no token. A position without any has the whole vocabulary.
        group: the ranks that hold the other columns; None if this rank holds them all.
        overwrite_logits: write the gradient over the logits, which saves their memory. They must have no other reader
            after the forward, and the backward can run only once.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive")
    settings = _Settings(vocab_size, temperature, with_entropy, with_sum_pi_squared, group, overwrite_logits)
    return TokenOutputs(*_TokenOutputs.apply(logits, targets, ids, support, reference, settings))


class TopTokens(NamedTuple):
    """The most probable tokens by descending probability: int32 ids and float32 log-probs, ``[n, k]`` each."""

    ids: Tensor
    log_probs: Tensor


@torch.no_grad()
def vocab_parallel_top_tokens(
    logits: Tensor,
    count: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> TopTokens:
    """Find the most probable tokens exactly; arguments of :func:`vocab_parallel_outputs`, communicates.

    Raises:
        ValueError: the vocabulary is smaller than ``count``.
    """
    if count > vocab_size:
        raise ValueError(f"{count} most probable tokens of {vocab_size}")
    settings = _Settings(vocab_size, temperature, False, False, group, False)
    width = logits.shape[1]
    real, first = settings.real_columns(width), settings.first_column(width)
    ids = torch.empty(len(logits), count, dtype=torch.int32, device=logits.device)
    log_probs = torch.empty(len(logits), count, dtype=torch.float32, device=logits.device)
    for rows in _chunks(logits):
        maximum = _maximum(logits[rows, :real], settings)
        shifted = _shifted(logits[rows, :real], maximum, settings)
        total = settings.all_reduce(shifted.exp().sum(-1))
        values, columns = shifted.topk(min(count, real))
        missing = (0, count - values.shape[1])
        values = settings.all_gather(torch.nn.functional.pad(values, missing, value=-torch.inf))
        tokens = settings.all_gather(torch.nn.functional.pad(columns + first, missing))
        best, order = values.topk(count)
        ids[rows], log_probs[rows] = tokens.gather(1, order).int(), best - total.log()[:, None]
    return TopTokens(ids, log_probs)


class _Settings(NamedTuple):
    vocab_size: int
    temperature: float
    with_entropy: bool
    with_sum_pi_squared: bool
    group: dist.ProcessGroup | None
    overwrite_logits: bool

    def first_column(self, width: int) -> int:
        """Token id of this rank's first column."""
        return width * (self.group.rank() if self.group is not None else 0)

    def real_columns(self, width: int) -> int:
        """Number of this rank's columns that are in the vocabulary, not padding; they come first."""
        return min(max(self.vocab_size - self.first_column(width), 0), width)

    def local_columns(self, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """This rank's columns of token ids, clamped to valid ones, and whether this rank has the token."""
        real, column = self.real_columns(width), ids - self.first_column(width)
        return column.clamp(0, max(real - 1, 0)), (column >= 0) & (column < real)

    def outside(self, support: Tensor | None, width: int) -> Tensor | None:
        """Mask of this rank's columns outside the support ``[n, k]``, bool ``[n, real columns]``; None without it."""
        if support is None:
            return None
        column, is_local = self.local_columns(support, width)
        real = self.real_columns(width)
        mask = torch.ones(len(support), real + 1, dtype=torch.bool, device=support.device)
        mask.scatter_(1, column.where(is_local, real), False)  # the extra column takes the others' tokens
        return mask[:, :real] & (support >= 0).any(-1, keepdim=True)

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor in place over the group; communicates."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Join the columns ``[n, k]`` of all ranks; communicates."""
        if self.group is None or self.group.size() == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, 1)


class _TokenOutputs(torch.autograd.Function):
    """Computes chunk by chunk in float32; the backward recomputes the probabilities from the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ids: Tensor | None,
        support: Tensor | None,
        reference: ReferenceHead | None,
        settings: _Settings,
    ) -> tuple[Tensor | None, ...]:
        real = settings.real_columns(logits.shape[1])
        column, is_local = settings.local_columns(targets, logits.shape[1])
        ids_column, ids_local = (None, None) if ids is None else settings.local_columns(ids, logits.shape[1])
        ids_log_probs = None if ids is None else torch.zeros_like(ids, dtype=torch.float32)
        # Seven numbers per token, saved for the backward: outputs, and maximum and sum of exponentials of both models.
        results = torch.empty(7, len(targets), dtype=torch.float32, device=logits.device)
        log_probs, entropy, kl, maximum, total, ref_maximum, ref_total = results
        squares = torch.empty_like(log_probs) if settings.with_sum_pi_squared else None
        is_argmax = torch.empty_like(is_local)
        for rows in _chunks(logits):
            outside = settings.outside(None if support is None else support[rows], logits.shape[1])
            maximum[rows] = _maximum(logits[rows, :real], settings, outside)
            shifted = _shifted(logits[rows, :real], maximum[rows], settings, outside)
            target, total[rows], moment, squared = _sums(shifted, column[rows], is_local[rows], settings)
            log_probs[rows] = target - total[rows].log()
            entropy[rows] = total[rows].log() - moment / total[rows]
            is_argmax[rows] = target == 0  # the distance to the largest logit
            if squares is not None:
                squares[rows] = squared / total[rows].square()
            if ids_log_probs is not None and ids_column is not None and ids_local is not None:
                if real:
                    ids_log_probs[rows] = shifted.gather(1, ids_column[rows]) * ids_local[rows]
                ids_log_probs[rows] = settings.all_reduce(ids_log_probs[rows]) - total[rows, None].log()
            if reference is not None:  # last, since it overwrites `shifted`
                ref_maximum[rows], ref_total[rows], kl[rows] = _kl(
                    shifted, total[rows], reference.logits(rows, real), settings, outside
                )
        ctx.mark_non_differentiable(*(constant for constant in (is_argmax, squares) if constant is not None))
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.reference = settings, reference
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, column, is_local, ids_column, ids_local, support, results)
        return (
            log_probs.clone(),
            entropy.clone() if settings.with_entropy else None,
            is_argmax,
            kl.clone() if reference is not None else None,
            ids_log_probs,
            squares,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        reference: ReferenceHead | None = ctx.reference
        logits, column, is_local, ids_column, ids_local, support, results = ctx.saved_tensors
        _, entropy, kl, maximum, total, ref_maximum, ref_total = results
        real = settings.real_columns(logits.shape[1])
        to_log_probs, to_entropy, _, to_kl, to_ids, _ = (None if g is None else g / settings.temperature for g in grads)
        result = logits.detach() if settings.overwrite_logits else torch.empty_like(logits)
        for rows in _chunks(logits):
            outside = settings.outside(None if support is None else support[rows], logits.shape[1])
            shifted = _shifted(logits[rows, :real], maximum[rows], settings, outside)
            grad = torch.zeros_like(shifted)
            if to_log_probs is not None or to_entropy is not None:
                probs = shifted.exp().div_(total[rows, None])
                if to_log_probs is not None and real:
                    torch.mul(probs, -to_log_probs[rows, None], out=grad)
                    grad.scatter_add_(1, column[rows, None], (to_log_probs[rows] * is_local[rows])[:, None])
                if to_entropy is not None:
                    slope = torch.xlogy(probs, probs).add_(probs.mul_(entropy[rows, None]))
                    grad.addcmul_(slope, to_entropy[rows, None], value=-1)
                    del slope
                del probs
            if to_ids is not None and real:
                grad.addcmul_(shifted.exp().div_(total[rows, None]), to_ids[rows].sum(-1, keepdim=True), value=-1)
                grad.scatter_add_(1, ids_column[rows], to_ids[rows] * ids_local[rows])
            if to_kl is not None and reference is not None:
                ref_shifted = _shifted(reference.logits(rows, real), ref_maximum[rows], settings, outside)
                probs, log_ratio = _probs_and_log_ratio(shifted, total[rows], ref_shifted, ref_total[rows])
                grad.addcmul_(probs.mul_(log_ratio.sub_(kl[rows, None])), to_kl[rows, None])
                del ref_shifted, probs, log_ratio
            result[rows, :real] = grad
            del shifted, grad  # before the next chunk's
        result[:, real:] = 0
        return result, None, None, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Ranges of tokens; the same on every rank of the group."""
    step = logits_chunk_rows(logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def _maximum(logits: Tensor, settings: _Settings, outside: Tensor | None = None) -> Tensor:
    """Largest logit of each token over the vocabulary or its support, float32; communicates."""
    if outside is not None:
        logits = logits.masked_fill(outside, -torch.inf)
    local = logits.amax(-1).float() if logits.shape[1] else logits.new_full((len(logits),), -torch.inf).float()
    return settings.all_reduce(local, dist.ReduceOp.MAX)


def _shifted(logits: Tensor, maximum: Tensor, settings: _Settings, outside: Tensor | None = None) -> Tensor:
    """Distance of the logits to the maximum over the temperature, in a new float32 tensor."""
    shifted = logits - maximum[:, None]
    if settings.temperature != 1:
        shifted.div_(settings.temperature)
    return shifted if outside is None else shifted.masked_fill_(outside, _OUTSIDE)


def _sums(shifted: Tensor, column: Tensor, is_local: Tensor, settings: _Settings) -> Tensor:
    """Sum over the vocabulary, ``[4, n]``; communicates.

    The target's shifted logit, the exponentials, if requested their products with the shifted logits, and squares.
    """
    sums = shifted.new_zeros(4, len(shifted))
    if shifted.shape[1]:
        sums[0] = shifted.gather(1, column[:, None])[:, 0] * is_local
    exps = shifted.exp()
    sums[1] = exps.sum(-1)
    if settings.with_sum_pi_squared:
        sums[3] = torch.linalg.vector_norm(exps, dim=-1).square()  # unlike a square first, without a copy
    if settings.with_entropy:
        sums[2] = exps.mul_(shifted).sum(-1)
    return settings.all_reduce(sums)


def _kl(
    shifted: Tensor, total: Tensor, ref_logits: Tensor, settings: _Settings, outside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reference's maximum and sum of exponentials, and the KL; overwrites ``shifted``, communicates."""
    ref_maximum = _maximum(ref_logits, settings, outside)
    ref_shifted = _shifted(ref_logits, ref_maximum, settings, outside)
    ref_total = settings.all_reduce(ref_shifted.exp().sum(-1))
    probs, log_ratio = _probs_and_log_ratio(shifted, total, ref_shifted, ref_total)
    return ref_maximum, ref_total, settings.all_reduce(probs.mul_(log_ratio).sum(-1))


def _probs_and_log_ratio(
    shifted: Tensor, total: Tensor, ref_shifted: Tensor, ref_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Policy's probabilities, and log-ratio of policy to reference; both overwrite the arguments."""
    log_probs = shifted.sub_(total.log()[:, None])
    log_ratio = torch.sub(log_probs, ref_shifted.sub_(ref_total.log()[:, None]), out=ref_shifted)
    return log_probs.exp_(), log_ratio
