"""A teacher in on-policy distillation that is a running SGLang server, not a model of this run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import TeacherError
from megarl.base.reductions import Total
from megarl.config.schema.distillation import TeacherServerConfig
from megarl.data import DataProto
from megarl.megatron.layers.logprobs import TEACHER_IDS
from megarl.rollout.sglang.teacher import TeacherServers, TokenGrades, TokenRow
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.distillation import TEACHER_LOG_PROB, TEACHER_TOPK
from megarl.workers.rows import SEQUENCES


class ServedTeacherWorker:
    """Requests the teacher's log-probs of the responses from servers; one process, without a device.

    Args:
        place: rank of this process; it needs no rendezvous.
        topk: most probable tokens to return per position; 0 = the log-prob of the response token.
        candidates: the student's vocabulary size, above every returned token.
    """

    def __init__(
        self, place: WorkerPlace, *, name: str, server: TeacherServerConfig, topk: int, candidates: int
    ) -> None:
        self.name, self.server, self.topk, self.candidates = name, server, topk, candidates
        self._counted = 0

    @verb(Dispatch.ALL)
    def init_model(self) -> None:
        """Prepare the client; the model lives in the servers."""
        self._servers = TeacherServers(f"distillation.teacher_models.{self.name}.server", self.server)

    @verb(Dispatch.ALL)
    def pending_device_bytes(self) -> int:
        """Return 0: the process uses no device."""
        return 0

    @verb(Dispatch.ONE)
    def pass_metrics(self) -> dict[str, float]:
        """Return metrics of the passes since the last call: the number of repeated requests."""
        before, self._counted = self._counted, self._servers.retries
        return {f"distillation/retries/{self.name}": Total(self._counted - before)}

    @verb(Dispatch.ONE)
    def describe(self) -> str:
        """Describe the servers in one line."""
        return f"SGLang at {', '.join(self.server.urls)}"

    @verb(Dispatch.SPLIT, phase="teacher", columns=SEQUENCES)
    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Compute ``teacher_log_prob [b, R]``, or ``teacher_topk_ids`` and ``teacher_topk_log_probs [b, R, k]``.

        Raises:
            TeacherError: see :meth:`TeacherServers.grade`; or a token is beyond the student's vocabulary.
        """
        prompts, responses = batch.unpadded("prompts"), batch.unpadded("responses")
        rows = [TokenRow(p.tolist(), r.tolist()) for p, r in zip(prompts, responses, strict=True)]
        try:
            grades = self._servers.grade(rows, self.topk)
        finally:
            self._servers.close()  # until the next step
        return batch.token_columns(self._columns(grades))

    def _columns(self, grades: Sequence[TokenGrades]) -> dict[str, Tensor]:
        if not self.topk:
            return {TEACHER_LOG_PROB: torch.from_numpy(np.concatenate([grade.log_probs for grade in grades]))}
        ids = np.concatenate([grade.top_ids for grade in grades])
        if ids.size and int(ids.max()) >= self.candidates:
            raise TeacherError(
                f"distillation.teacher_models.{self.name}.server.urls={self.server.urls}: token {int(ids.max())} is "
                f"among the {self.topk} most probable, and the policy has {self.candidates} tokens; set a smaller "
                "distillation.distillation_loss.topk",
                code="teacher.token-outside-vocabulary",
            )
        values = np.concatenate([grade.top_log_probs for grade in grades])
        return {TEACHER_IDS: torch.from_numpy(ids), TEACHER_TOPK: torch.from_numpy(values)}
