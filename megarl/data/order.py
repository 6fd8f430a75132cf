"""Row orders with exact resume: epochs, curricula, custom samplers, and mixtures of data sets.

An order returns batches of row numbers, epoch by epoch. Its state is plain values and describes the position after the
last returned batch; nothing is drawn ahead.

A mixture assigns rows to data sets exactly and without a random draw. The credit of a set grows by its share with every
row of the batch and decreases by one with each row that it gives; each row goes to the set with the most credit. After
any number of rows, a set has given its share of them within the number of sets, and exactly in the long run. Every set
goes through its rows in separate epochs, shuffled by ``(seed, name, epoch)``. A set with no rows left starts its next
epoch in the middle of a batch: no row is dropped, and no row is repeated before all others of its set.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from megarl.base.errors import DataError


class RowOrder(ABC):
    """Batches of row numbers; by default a function of epoch and position alone, without metrics.

    Attributes:
        batch_size: rows of a batch; the last batch of an epoch may have fewer.
        dropped_per_epoch: rows that an epoch drops because they do not fill a batch.
        identity: fingerprint that a resumed state must match, as plain values.
    """

    batch_size: int
    batches_per_epoch: int
    dropped_per_epoch: int
    identity: dict[str, Any]

    @abstractmethod
    def batches(self, epoch: int, position: int) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch from ``position`` on; the state of the order must be at ``position``."""

    def update(self, batch: Any) -> None:  # noqa: B027 -- most orders ignore it
        """Process a finished step's batch with all its computed columns."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that :meth:`batches` needs in addition to epoch and position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 -- most orders have no state
        """Resume at a saved state."""


def permutation(rows: int, *entropy: int) -> np.ndarray:
    """Permute row numbers by a seed sequence.

    All numbers of ``entropy`` form the seed together. Their sum would give neighbouring seeds the same orders.
    """
    return np.random.default_rng(list(entropy)).permutation(rows)


class EpochOrder(RowOrder):
    """All rows once per epoch: in file order, shuffled by ``(seed, epoch)``, or sorted by difficulty (curriculum).

    Args:
        difficulty: ``[rows]``, the sort key of the first ``sorted_epochs`` epochs, ascending. Rows of equal difficulty
            keep the order of an epoch without sorting. None = no sorting.

    Raises:
        DataError: there is no row, or not one batch.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int | None,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        difficulty: np.ndarray | None = None,
        sorted_epochs: int = 0,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size or rows
        check_enough_rows(rows, self.batch_size, drop_last)
        self.seed = seed
        self.shuffle = shuffle
        self.dropped_per_epoch = rows % self.batch_size if drop_last else 0
        self.batches_per_epoch = -(-(rows - self.dropped_per_epoch) // self.batch_size)
        self.identity = {
            "rows": rows,
            "batch_size": self.batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        self._difficulty = difficulty if sorted_epochs else None
        self._sorted_epochs = sorted_epochs
        if self._difficulty is not None:
            self.identity |= {"sorted_epochs": sorted_epochs, "difficulty": float(np.sum(self._difficulty))}

    def batches(self, epoch: int, position: int) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch; see :meth:`RowOrder.batches`."""
        order = self.epoch_rows(epoch)
        for number in range(position, self.batches_per_epoch):
            yield order[number * self.batch_size : (number + 1) * self.batch_size].tolist()

    def epoch_rows(self, epoch: int) -> np.ndarray:
        """Return all rows in the order of an epoch."""
        order = permutation(self.rows, self.seed, epoch) if self.shuffle else np.arange(self.rows)
        if self._difficulty is None or epoch >= self._sorted_epochs:
            return order
        return order[np.argsort(self._difficulty[order], kind="stable")]


class SamplerOrder(RowOrder):
    """The order of a user's sampler.

    Args:
        sampler: iterates over row numbers, once per epoch; its length is the rows of an epoch. A sampler with
            ``update(batch)``, called with every step's batch, must also have ``state_dict`` and ``load_state_dict``,
            and iterate from the position of a loaded state. Without these the rows of an epoch must be reproducible.
        batch_size: rows per batch; rows that do not fill a batch are dropped.

    Raises:
        DataError: the sampler lacks a method.
    """

    def __init__(self, sampler: Any, batch_size: int) -> None:
        name = type(sampler).__name__
        stateful = [hasattr(sampler, method) for method in ("state_dict", "load_state_dict")]
        if hasattr(sampler, "update") and not all(stateful):
            raise DataError(
                f"data.sampler: {name} has update(), so its order depends on the run; it also needs state_dict() and "
                "load_state_dict(), so that a run can be resumed",
                code="data.sampler-state",
            )
        if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
            text = f"data.sampler: {name} must have __iter__ over row numbers, and __len__"
            raise DataError(text, code="data.sampler-methods")
        self.sampler = sampler
        self.batch_size = batch_size
        rows = len(sampler)
        check_enough_rows(rows, batch_size, True)
        self.dropped_per_epoch = rows % batch_size
        self.batches_per_epoch = rows // batch_size
        self.identity = {"rows": rows, "batch_size": batch_size, "sampler": name}
        self._stateful = all(stateful)

    def batches(self, epoch: int, position: int) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch; see :meth:`RowOrder.batches`."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        rows = iter(self.sampler)
        if not self._stateful:
            rows = islice(rows, position * self.batch_size, None)
        for _ in range(position, self.batches_per_epoch):
            batch = [int(row) for row in islice(rows, self.batch_size)]
            if len(batch) < self.batch_size:
                text = f"data.sampler: {type(self.sampler).__name__} returned fewer rows than its length"
                raise DataError(text, code="data.sampler-length")
            yield batch

    def update(self, batch: Any) -> None:
        """Pass the batch to the sampler if it has ``update``."""
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the sampler if it has any."""
        return dict(self.sampler.metrics()) if hasattr(self.sampler, "metrics") else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a stateful sampler."""
        return {"sampler": self.sampler.state_dict()} if self._stateful else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a stateful sampler."""
        if self._stateful:
            self.sampler.load_state_dict(state["sampler"])


def check_enough_rows(rows: int, batch_size: int, drop_last: bool) -> None:
    """Check that the data fill at least one batch.

    Raises:
        DataError: there is no row, or with ``drop_last`` less than a batch.
    """
    if rows == 0 or (drop_last and rows < batch_size):
        text = f"the data set has {rows} rows, a batch needs {batch_size}; add rows, or lower data.train_batch_size"
        raise DataError(text, code="data.too-few-rows")


@dataclass(frozen=True)
class MixtureSchedule:
    """A data set's weight as a function of the step: linear between points, constant outside.

    Attributes:
        points: ``(step, weight)`` in ascending order of steps; steps are counted from 1.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, setting: Any) -> MixtureSchedule:
        """Parse a number, or a mapping of steps to numbers.

        Raises:
            DataError: the setting is neither, a weight is negative or not finite, or all weights are 0.
        """
        try:
            pairs = setting.items() if isinstance(setting, Mapping) else [(1, setting)]
            points = tuple(sorted((int(step), float(weight)) for step, weight in pairs))
        except (TypeError, ValueError):
            points = ()
        weights = [weight for _, weight in points]
        if not points or isinstance(setting, bool) or not all(0 <= weight < float("inf") for weight in weights):
            text = f"must be a number >= 0, or such numbers by step as {{1: 0.2, 100: 1}}, got {setting!r:.80}"
            raise DataError(text, code="data.mixture-weight")
        if not any(weights):
            raise DataError(f"must be above 0 at some step, got {setting!r:.80}", code="data.mixture-zero")
        return cls(points)

    def at(self, step: int) -> float:
        """Return the weight at a step."""
        steps, weights = zip(*self.points, strict=True)
        return float(np.interp(step, steps, weights))


@dataclass(frozen=True)
class MixedSet:
    """A data set of a mixture, with its weight relative to the other sets."""

    name: str
    rows: int
    weight: MixtureSchedule


class MixtureOrder(RowOrder):
    """Batches from several concatenated data sets in given proportions.

    An epoch of the mixture is the number of batches that all rows together fill.

    Raises:
        DataError: a set has no row, or all sets together have less than a batch.
    """

    dropped_per_epoch = 0

    def __init__(self, sets: Sequence[MixedSet], batch_size: int, seed: int, shuffle: bool = True) -> None:
        for data_set in sets:
            if not data_set.rows:
                raise DataError(f"data.mixture: {data_set.name} has no row left", code="data.mixture-empty")
        self.sets = list(sets)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        rows = sum(data_set.rows for data_set in sets)
        check_enough_rows(rows, batch_size, True)
        self.batches_per_epoch = rows // batch_size
        counts = {data_set.name: data_set.rows for data_set in sets}
        self.identity = {"rows": counts, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        for step in sorted({max(1, step) for data_set in sets for step, _ in ((1, 0.0), *data_set.weight.points)}):
            self.shares(step)
        self._starts = np.cumsum([0, *(data_set.rows for data_set in sets)])
        self._step = 0
        self._given = [0] * len(sets)
        self._credit = [0.0] * len(sets)
        self._last = [0] * len(sets)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def batches(self, epoch: int, position: int) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch; see :meth:`RowOrder.batches`."""
        for _ in range(position, self.batches_per_epoch):
            yield self._next_batch()

    def shares(self, step: int) -> list[float]:
        """Return each set's share of a step's rows; raise DataError if none has a weight."""
        weights = [data_set.weight.at(step) for data_set in self.sets]
        total = sum(weights)
        if total <= 0:
            raise DataError(f"data.mixture: no data set has a weight above 0 at step {step}", code="data.mixture-zero")
        return [weight / total for weight in weights]

    def metrics(self) -> dict[str, float]:
        """Share of each set in the last batch, and its number of epochs so far."""
        metrics: dict[str, float] = {}
        for data_set, last, given in zip(self.sets, self._last, self._given, strict=True):
            metrics[f"data/{data_set.name}/share"] = last / self.batch_size
            metrics[f"data/{data_set.name}/epochs"] = given / data_set.rows
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches, and rows and credit of each set."""
        names = [data_set.name for data_set in self.sets]
        given, credit = dict(zip(names, self._given, strict=True)), dict(zip(names, self._credit, strict=True))
        return {"step": self._step, "given": given, "owed": credit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved state; the weights may differ from the saved run."""
        self._step = state["step"]
        self._given = [state["given"][data_set.name] for data_set in self.sets]
        self._credit = [state["owed"][data_set.name] for data_set in self.sets]

    def _next_batch(self) -> list[int]:
        self._step += 1
        shares, before = self.shares(self._step), list(self._given)
        rows = []
        for _ in range(self.batch_size):
            self._credit = [credit + share for credit, share in zip(self._credit, shares, strict=True)]
            # a set without weight at this step gives no row, regardless of its credit
            chosen = max((index for index, share in enumerate(shares) if share > 0), key=lambda i: self._credit[i])
            self._credit[chosen] -= 1
            rows.append(int(self._starts[chosen] + self._next_row(chosen)))
            self._given[chosen] += 1
        self._last = [given - earlier for given, earlier in zip(self._given, before, strict=True)]
        return rows

    def _next_row(self, index: int) -> int:
        data_set = self.sets[index]
        epoch, position = divmod(self._given[index], data_set.rows)
        if not self.shuffle:
            return position
        if index not in self._orders or self._orders[index][0] != epoch:
            seed_parts = self.seed, zlib.crc32(data_set.name.encode()), epoch
            self._orders[index] = epoch, permutation(data_set.rows, *seed_parts)
        return int(self._orders[index][1][position])
