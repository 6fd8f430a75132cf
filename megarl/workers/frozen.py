"""Frozen policies in separate processes: the reference, and the teachers of on-policy distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megarl.data import DataProto
from megarl.megatron import OutputOptions
from megarl.megatron.layers.logprobs import SUPPORT, TEACHER_HIDDEN, TEACHER_IDS, TEACHER_NUMBER
from megarl.workers.actor import PolicyWorker
from megarl.workers.base import offload_after
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.distillation import TEACHER_LOG_PROB, TEACHER_TOPK
from megarl.workers.rows import FORWARD, SEQUENCES
from megarl.workers.settings import HiddenForm, LogProbSettings, RoleSettings


class ReferenceWorker(PolicyWorker):
    """Computes the initial policy's log-probs and representations in separate processes, for the KL and ReprAlign."""

    prefix = "ref"

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings, log_prob: LogProbSettings) -> None:
        super().__init__(place, settings=settings)
        self.log_prob = log_prob

    @verb(Dispatch.SPLIT, phase="ref", columns=(*SEQUENCES, SUPPORT))
    @offload_after
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto | None:
        """Compute ``ref_log_prob`` of the response tokens, ``[b, R]``."""
        result = self.log_probs(batch, self.log_prob, with_entropy=False)
        return None if result is None else batch.token_columns({"ref_log_prob": result["log_probs"]})

    @verb(Dispatch.SPLIT, phase="repr_align", columns=(*SEQUENCES, "response_mask"))
    @offload_after
    def compute_ref_representations(self, batch: DataProto) -> DataProto | None:
        """Compute ``representations [b, hidden]``: means of final hidden states over the ``response_mask``."""
        return self.representations(batch, self.log_prob.budget)


class TeacherWorker(PolicyWorker):
    """Computes the teacher's log-probs of the responses, or of its most probable tokens at each position.

    Args:
        topk: most probable tokens to return per position; 0 = the log-prob of the response token.
        candidates: the student's vocabulary size; the teacher's distributions are over these tokens.
        hidden: return final hidden states in this form instead, for the exact KL; None = log-probs.
    """

    prefix = "teacher"

    def __init__(
        self,
        place: WorkerPlace,
        *,
        settings: RoleSettings,
        log_prob: LogProbSettings,
        topk: int,
        candidates: int,
        hidden: HiddenForm | None = None,
    ) -> None:
        super().__init__(place, settings=settings)
        self.log_prob = replace(log_prob, vocab_size=candidates)
        self.topk = topk
        self.hidden = hidden

    @verb(Dispatch.SPLIT, phase="teacher", columns=SEQUENCES)
    @offload_after
    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto | None:
        """Compute ``teacher_log_prob [b, R]``, or ``teacher_topk_ids`` and ``teacher_topk_log_probs [b, R, k]``.

        For the exact KL ``teacher_hidden [b, R, hidden]``, and with several teachers ``teacher_number [b, R]``.
        """
        if self.hidden is not None:
            states = self._hidden_states(batch)
            return None if states is None else batch.token_columns(hidden_columns(states, self.hidden))
        if self.topk:
            columns = self._top_tokens(batch)
            return None if columns is None else batch.token_columns(columns)
        result = self.log_probs(batch, self.log_prob, with_entropy=False)
        return None if result is None else batch.token_columns({TEACHER_LOG_PROB: result["log_probs"]})

    def _hidden_states(self, batch: DataProto) -> Tensor | None:
        """Final hidden states that predict the response tokens, packed ``[n, hidden]``; None before the last stage."""
        rows = self.packed_rows(batch, self.log_prob.budget)

        def compute(groups: Sequence[Sequence[int]]) -> Tensor | None:
            states = self.engine.hidden([rows.pack(group) for group in groups])
            return None if states is None else rows.repack(groups, states, range(len(rows)))

        return self.memory.run_pass(FORWARD, self.log_prob.budget, rows, compute)

    def _top_tokens(self, batch: DataProto) -> dict[str, Tensor] | None:
        rows = self.packed_rows(batch, self.log_prob.budget)
        options = OutputOptions(self.log_prob.temperature, top=self.topk, vocab_size=self.log_prob.vocab_size)

        def read(groups: Sequence[Sequence[int]], outputs: Sequence[Any]) -> dict[str, Tensor]:
            return {
                TEACHER_IDS: rows.unpack(groups, [output.top.ids for output in outputs]),
                TEACHER_TOPK: rows.unpack(groups, [output.top.log_probs for output in outputs]),
            }

        return self.forward_pass(rows, self.log_prob.budget, read, options=options)


def hidden_columns(states: Tensor, form: HiddenForm) -> dict[str, Tensor]:
    """Build the columns of a teacher's hidden states, which other teachers' rows can join.

    Args:
        states: packed ``[n, hidden]``.
    """
    states = states.to(getattr(torch, form.dtype))
    if states.shape[1] < form.width:
        states = functional.pad(states, (0, form.width - states.shape[1]))
    columns = {TEACHER_HIDDEN: states}
    if form.number is not None:
        columns[TEACHER_NUMBER] = torch.full((len(states),), form.number, dtype=torch.int16)
    return columns
