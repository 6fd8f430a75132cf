"""Ledger of the groups between admission and training, and the rule, check and metrics of their staleness.

Versions count the batches of ``train_batch_size`` prompts that were trained, since a weight sync follows each. A group
is admitted at the version of the engines' weights, and its oldest token has at least that version. The ledger keeps
three promises:

- *Bound.* A group admitted at version ``a`` is trained at version ``a + ceil(max_staleness)`` or earlier. Up to the end
  of version ``v``, at most ``(max_staleness + v + 1) * batch`` groups are admitted (AReaL's rule). Batches reserve
  slots for groups at the staleness bound, and training waits for these groups. No long response is dropped.
- *Once.* Each admitted group is trained or dropped exactly once, also by a run that resumes from
  :meth:`GroupLedger.state_dict`. A group without variance is dropped (dynamic sampling), and its slot admits the next.
- *Order.* With staleness 0 a batch is the first groups in the order of their numbers that are not dropped. Without
  surplus, exactly these are admitted: a group beyond the last of the batch would need one more drop than there are
  before it. With surplus, groups beyond the batch start again under the next version.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.agents.types import Trajectory
from megarl.base.errors import CheckpointError, ConfigError, WeightSyncError
from megarl.base.reductions import Largest, Metrics, Total
from megarl.rollout.interface import NO_VERSION


@dataclass(frozen=True)
class AdmissionRule:
    """Admission rule: limits prompts in flight so that no sample exceeds the staleness bound.

    Attributes:
        batch: prompts that are trained per weight version.
        max_staleness: bound in weight versions; a fraction admits that part of a batch ahead. 0 = synchronous.
        total: prompts of the whole run, beyond which none is admitted; None = no limit.
        surplus: prompts that are admitted beyond a batch to keep the engines busy; only with staleness 0.
    """

    batch: int
    max_staleness: float = 0.0
    total: int | None = None
    surplus: int = 0

    @property
    def bound(self) -> int:
        """Largest staleness of a token in whole weight versions."""
        return math.ceil(self.max_staleness)

    def capacity(self, version: int, accepted: int, running: int) -> int:
        """Count the prompts to admit: ``(max_staleness + version + 1) * batch + surplus - (accepted + running)``.

        Args:
            version: current weight version, from 0.
            accepted: prompts whose samples have all ended, trained or not, without dropped ones.
            running: prompts with unfinished samples.
        """
        # The sum of a whole part and a rounded one: 0.1 * 30 is above 3 in floating point, and 0.7 * 10 below 7.
        allowed = (version + 1) * self.batch + math.floor(round(self.max_staleness * self.batch, 6))
        if self.total is not None:
            allowed = min(allowed, self.total)
        return max(0, allowed + self.surplus - accepted - running)


@dataclass
class LedgerEntry:
    """An admitted and untrained group.

    Attributes:
        version: weight version at admission.
        missing: numbers of its unfinished samples.
        finished: its place in the order of completion; None while samples are missing.
    """

    version: int
    missing: set[int] = field(default_factory=set)
    finished: int | None = None


class GroupLedger:
    """Counts groups from admission to training, and composes batches in the order of completion.

    Attributes:
        admitted: groups so far; the number of the next one.
        trained: groups that were trained.
        dropped: groups that were dropped.
        synced: weight version of the engines, which lags behind :attr:`version` between a batch and its sync.
    """

    def __init__(self, rule: AdmissionRule, samples: int) -> None:
        self.rule = rule
        self.samples = samples
        self.admitted = self.trained = self.dropped = self.synced = self._completions = 0
        self._entries: dict[int, LedgerEntry] = {}

    @property
    def version(self) -> int:
        """Weight version: the number of batches that were trained in full."""
        return self.trained // self.rule.batch

    @property
    def running(self) -> list[int]:
        """Groups with unfinished samples, in the order of admission."""
        return [number for number, entry in self._entries.items() if entry.missing]

    @property
    def finished(self) -> list[int]:
        """Finished and untrained groups, in the order of completion."""
        finished = {number: entry.finished for number, entry in self._entries.items() if entry.finished is not None}
        return sorted(finished, key=finished.__getitem__)

    @property
    def untrained(self) -> list[int]:
        """All admitted and untrained groups, in the order of admission."""
        return list(self._entries)

    @property
    def capacity(self) -> int:
        """Number of prompts to admit now."""
        running = len(self.running)
        return self.rule.capacity(self.synced, self.admitted - self.dropped - running, running)

    def admit(self, count: int) -> list[int]:
        """Admit prompts; return the numbers of their groups, in sequence over the whole run.

        Raises:
            ValueError: ``count`` exceeds :attr:`capacity`.
        """
        if count > self.capacity:
            raise ValueError(f"{count} prompts exceed the capacity of {self.capacity}")
        numbers = list(range(self.admitted, self.admitted + count))
        self.admitted += count
        for number in numbers:
            self._entries[number] = LedgerEntry(self.synced, set(range(self.samples)))
        return numbers

    def sync(self) -> None:
        """Record that the engines have the weights of :attr:`version`."""
        self.synced = self.version

    def missing(self, number: int) -> set[int]:
        """Return the unfinished samples of a group."""
        return set(self._entries[number].missing)

    def end_sample(self, number: int, sample: int) -> bool:
        """Record the end of a sample; return whether its group is finished.

        Raises:
            KeyError: the sample is unknown, or has ended before.
        """
        entry = self._entries[number]
        entry.missing.remove(sample)
        if entry.missing:
            return False
        entry.finished, self._completions = self._completions, self._completions + 1
        return True

    def next_batch(self, size: int) -> list[int] | None:
        """Compose the next batch: finished groups in the order of completion, as far as the bound allows.

        Groups at the bound have priority, even unfinished ones: their slots are not given to later groups.

        Args:
            size: groups of the batch; divides ``rule.batch``.

        Returns:
            Groups in the order of admission; None while too few are finished.
        """
        if self.rule.surplus:
            first = self.untrained[:size]
            return first if len(first) == size and set(first) <= set(self.finished) else None
        spare = self._spare_places()
        chosen: list[int] = []
        for number in self.finished:
            earlier = spare[: max(0, self._latest(number) - self.version)]
            if all(places > 0 for places in earlier):
                spare[: len(earlier)] = [places - 1 for places in earlier]
                chosen.append(number)
        return sorted(chosen[:size]) if len(chosen) >= size else None

    def _latest(self, number: int) -> int:
        """Return the last version at which a group may be trained."""
        return self._entries[number].version + self.rule.bound

    def _spare_places(self) -> list[int]:
        """Count the free batch slots per version, from the current one up to the bound."""
        latest = Counter(max(0, self._latest(number) - self.version) for number in self._entries)
        places = self.rule.batch - self.trained % self.rule.batch
        needed = itertools.accumulate(latest[ahead] for ahead in range(self.rule.bound + 1))
        return [places + ahead * self.rule.batch - count for ahead, count in enumerate(needed)]

    def drop(self, number: int) -> None:
        """Take a finished group out, and give its slot back."""
        del self._entries[number]
        self.dropped += 1

    def reinstate(self, count: int) -> None:
        """Count dropped groups as trained, since they fill a batch."""
        self.dropped -= count
        self.trained += count

    def restart(self, dropped: Collection[int]) -> list[int]:
        """Let untrained and ``dropped`` groups start again with the next weights; return all in their order."""
        numbers = sorted({*self._entries, *dropped})
        self.dropped -= len(dropped)
        self._entries = {number: LedgerEntry(self.version, set(range(self.samples))) for number in numbers}
        return numbers

    def staleness(self, number: int) -> int:
        """Return the weight versions since the admission of a group."""
        return self.version - self._entries[number].version

    def train(self, numbers: Sequence[int]) -> None:
        """Record that a batch is trained.

        Raises:
            ValueError: a group is unknown or unfinished.
        """
        finished = set(self.finished)
        for number in numbers:
            if number not in finished:
                raise ValueError(f"group {number} is not finished")
        for number in numbers:
            del self._entries[number]
        self.trained += len(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the untrained groups, for a checkpoint."""
        return {
            "batch": self.rule.batch,
            "samples": self.samples,
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": self.dropped,
            "groups": [
                [number, entry.version, sorted(entry.missing), entry.finished]
                for number, entry in self._entries.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; unfinished samples have to be generated again.

        Raises:
            CheckpointError: the state belongs to other batch sizes.
            ConfigError: groups are staler than the bound of this run allows.
        """
        for name, key, value in (
            ("batch", "data.train_batch_size", self.rule.batch),
            ("samples", "actor_rollout_ref.rollout.n", self.samples),
        ):
            if state[name] != value:
                raise CheckpointError(
                    f"{key}={value}: the checkpoint has samples in flight from a run with {state[name]}; resume with "
                    "that value",
                    code="resume.batch-sizes",
                )
        self.admitted, self.trained, self.dropped = state["admitted"], state["trained"], state.get("dropped", 0)
        self.synced = self.version
        self._entries = {
            number: LedgerEntry(version, set(missing), finished)
            for number, version, missing, finished in state["groups"]
        }
        places = [entry.finished for entry in self._entries.values() if entry.finished is not None]
        self._completions = max(places, default=-1) + 1
        overdue = any(self._latest(number) < self.version for number in self._entries)
        if overdue or (not self.rule.surplus and min(self._spare_places()) < 0):  # restarted groups may exceed a batch
            raise ConfigError(
                f"async_training.max_staleness={self.rule.max_staleness:g}: the checkpoint has samples in flight from "
                "a run with a larger bound; resume with that bound",
                code="resume.staleness-bound",
            )

    def start_at(self, step: int) -> None:
        """Continue after this step without work in flight, as after a synchronous run."""
        self.admitted = self.trained = step * self.rule.batch
        self.synced = step


def check_staleness(trajectories: Sequence[Trajectory], version: int, bound: int) -> None:
    """Check that the tokens of a batch, which ``version`` trains, are within the bound of staleness.

    Raises:
        WeightSyncError: a token is newer than ``version``, or staler than the bound.
    """
    for trajectory in trajectories:
        versions = trajectory.weight_versions if len(trajectory.weight_versions) else [trajectory.weight_version]
        sampled_by = [int(number) for number in versions if number != NO_VERSION]
        if sampled_by and not version - bound <= min(sampled_by) <= max(sampled_by) <= version:
            raise WeightSyncError(
                f"a sample was generated by the weight versions {min(sampled_by)} to {max(sampled_by)}; version "
                f"{version} trains samples of {version - bound} or later (async_training.max_staleness={bound}). "
                "Resume the run from its last checkpoint",
                code="sync.stale-sample",
            )


def staleness_metrics(trajectories: Sequence[Trajectory], version: int, admission: Sequence[int]) -> Metrics:
    """Compute the staleness metrics of a batch that ``version`` trains, under verl's names where they exist.

    Failed trajectories and those without a version are left out. ``admission`` has the weight versions since the
    admission of each group.

    - ``training/off_policy/token_staleness/{mean,max}``: over generated tokens.
    - ``training/off_policy/trajectory_staleness``: of the oldest token, mean over trajectories;
      ``training/off_policy/trajectory_staleness_worst``: the largest.
    - ``training/off_policy/admission_staleness``: of groups since their admission, mean.
    - ``fully_async/partial/{total_partial_num,partial_ratio,max_partial_span}``: trajectories with several weight
      versions, their share, and the largest difference within one.
    - ``fully_async/count/current_param_version``.
    """
    metrics = {
        "fully_async/count/current_param_version": float(version),
        "training/off_policy/admission_staleness": float(np.mean(admission)),
    }
    rows = [versions for trajectory in trajectories if len(versions := token_versions(trajectory))]
    if not rows:
        return metrics
    stale = version - np.concatenate(rows)
    oldest = np.array([row.min() for row in rows])
    spans = np.array([row.max() for row in rows]) - oldest
    partial = int((spans > 0).sum())
    return metrics | {
        "training/off_policy/token_staleness/mean": float(stale.mean()),
        "training/off_policy/token_staleness/max": Largest(stale.max()),
        "training/off_policy/trajectory_staleness": float((version - oldest).mean()),
        "training/off_policy/trajectory_staleness_worst": Largest((version - oldest).max()),
        "fully_async/partial/total_partial_num": Total(partial),
        "fully_async/partial/partial_ratio": partial / len(trajectories),
        "fully_async/partial/max_partial_span": Largest(spans.max()),
    }


def token_versions(trajectory: Trajectory) -> np.ndarray:
    """Return the weight version of each generated token, ``[t]``; empty if the trajectory failed or has none."""
    mask = np.asarray(trajectory.generated_mask, bool)
    if trajectory.error is not None or trajectory.weight_version == NO_VERSION:
        return np.empty(0, np.int64)
    if len(trajectory.weight_versions):
        versions: np.ndarray = np.asarray(trajectory.weight_versions, np.int64)[mask]
        sampled_by: np.ndarray = versions[versions != NO_VERSION]
        return sampled_by
    return np.full(int(mask.sum()), trajectory.weight_version, np.int64)
