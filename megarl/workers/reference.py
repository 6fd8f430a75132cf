"""The reference policy with separate processes: frozen, for the KL penalty and for representations of responses."""

from __future__ import annotations

from megarl.data import DataProto
from megarl.workers.actor import PolicyWorker
from megarl.workers.base import offload_after
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.rows import SEQUENCES
from megarl.workers.settings import LogProbSettings, RoleSettings


class ReferenceWorker(PolicyWorker):
    """Computes the initial policy's log-probs, and its representations of responses."""

    prefix = "ref"

    def __init__(
        self,
        place: WorkerPlace,
        *,
        settings: RoleSettings,
        log_prob: LogProbSettings,
    ) -> None:
        super().__init__(place, settings=settings)
        self.log_prob = log_prob

    @verb(Dispatch.SPLIT, phase="ref", columns=SEQUENCES)
    @offload_after
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto | None:
        """Compute ``ref_log_prob`` of the response tokens, ``[b, R]``."""
        result = self.log_probs(batch, self.log_prob, with_entropy=False)
        return None if result is None else batch.token_columns({"ref_log_prob": result["log_probs"]})

    @verb(Dispatch.SPLIT, phase="repr_align", columns=(*SEQUENCES, "response_mask"))
    @offload_after
    def compute_ref_representations(self, batch: DataProto) -> DataProto | None:
        """Compute ``representations [b, hidden]`` of the responses: means of final hidden states over
        ``response_mask``.

        """
        return self.representations(batch, self.log_prob.budget)
