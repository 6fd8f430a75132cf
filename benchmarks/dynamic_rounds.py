"""Callback that gives dynamic sampling the rounds of other frameworks, as a baseline for ``asynchronous.py``.

A round is a whole batch of prompts. The next one is admitted when all samples of the round have ended and been scored,
if too few groups have varied scores. ``data.gen_batch_size`` is above ``data.train_batch_size``, so that groups beyond
the batch start again in the next step, as parts of its first round. Everything else is the product's code.
"""

from __future__ import annotations

from megarl.samples.service import SampleService
from megarl.trainer.callbacks import Callback


class Rounds(Callback):
    """Replaces the admission of the run's process."""

    def __init__(self) -> None:
        SampleService._admissible = property(admissible)  # type: ignore[assignment, method-assign]


def admissible(service: SampleService) -> int:
    """Count the prompts to admit: a batch between two rounds, none within a round."""
    ledger, unsent = service.ledger, service._unsent
    batch = ledger.rule.batch
    in_flight = set(ledger.running) - set(unsent)
    return 0 if in_flight or len(ledger.finished) >= batch else batch - len(unsent)
