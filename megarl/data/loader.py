"""Data loader with exact resume, and a prompt queue that takes any number of prompts from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import Dataset

from megarl.base.errors import DataError
from megarl.data.order import EpochOrder, RowOrder
from megarl.data.protocol import DataProto

logger = logging.getLogger(__name__)

REST = "rest"
"""State key: row numbers of the loader's last batch that were not taken yet."""


class StatefulLoader:
    """Data loader that iterates over one epoch at a time and resumes exactly at a saved state.

    Each pass of a ``for`` loop is one epoch; ``epoch`` increases after it. The state counts the returned batches: save
    it after the step that used the batch.

    Args:
        batch_size: rows per batch; None for all rows in one batch.
        seed: the order of an epoch is a function of seed and epoch alone.
        shuffle: False keeps the order of the files.
        drop_last: drop the rows of an epoch that do not fill a batch (logged, and counted in ``dropped_per_epoch``).
        order: a custom order of the rows; batch size, seed, shuffle and drop_last are then not read.

    Attributes:
        epoch: epoch of the next batch, from 0.
        dropped_per_epoch: rows that ``drop_last`` drops in each epoch; with shuffling different rows in each.

    Raises:
        DataError: the data set is empty, or smaller than one batch with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        collate: Callable[[list[Any]], DataProto],
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        order: RowOrder | None = None,
    ) -> None:
        assert isinstance(dataset, Sized)  # map-style
        self.order: RowOrder = order or EpochOrder(len(dataset), batch_size, seed, shuffle, drop_last)
        self.epoch = 0
        self.dropped_per_epoch = self.order.dropped_per_epoch
        if self.dropped_per_epoch:
            logger.warning(
                "%d of %d rows are dropped in each epoch: they do not fill a batch of %d",
                self.dropped_per_epoch,
                len(dataset),
                self.order.batch_size,
            )
        self.dataset = dataset
        self._collate = collate
        self.last_rows: list[int] = []
        self._position = 0
        self._restored = False

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self.order.batches_per_epoch

    def __iter__(self) -> Iterator[DataProto]:
        """Iterate over the batches of the current epoch; after :meth:`load_state_dict` over the remaining ones."""
        if not self._restored:
            self.epoch += self._position == len(self)  # a loop that stopped after its last batch
            self._position = 0
        self._restored = False
        for rows in self.order.batches(self.epoch, self._position):
            batch, self.last_rows = self.rows(rows), list(rows)
            self._position += 1
            yield batch
        self.epoch += 1
        self._position = 0

    def rows(self, numbers: Sequence[int]) -> DataProto:
        """Return rows of the data set as a batch."""
        return self._collate([self.dataset[number] for number in numbers])

    def update(self, batch: DataProto) -> None:
        """Pass a step's batch with all its computed columns to the order; call it after the step."""
        self.order.update(batch)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the order for the last batch."""
        return self.order.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: epoch, position, and the state of the order, as plain values."""
        finished = self._position == len(self)
        position = {"epoch": self.epoch + finished, "position": 0 if finished else self._position}
        return {**self.order.identity, **position, "order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved state.

        Raises:
            DataError: the state belongs to other data, another batch size or another order.
        """
        for name, value in self.order.identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the saved loader state has {name}={state.get(name)}, this run has {value}; resume with the same "
                    "data, batch size and seed, or start a new run with trainer.resume_mode=disable",
                    code="resume.data-changed",
                )
        self.epoch, self._position = state["epoch"], state["position"]
        self._restored = True
        self.order.load_state_dict(state.get("order", {}))


class PromptQueue:
    """Takes any number of rows in its loader's order, over all epochs, and resumes exactly at a state."""

    def __init__(self, loader: StatefulLoader) -> None:
        self.loader = loader
        self._batches: Iterator[DataProto] = iter(())
        self._rest: DataProto | None = None
        self._rest_ends_epoch = False

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """Epoch of the last taken row, from 0."""
        return self.loader.epoch - self._rest_ends_epoch

    def take(self, count: int) -> DataProto:
        """Take the next ``count`` rows."""
        parts: list[DataProto] = []
        while missing := count - sum(map(len, parts)):
            rest = self._rest or self._next_batch()
            part, left = rest[:missing], rest[missing:]
            parts.append(part)
            self._rest = left if len(left) else None
        return DataProto.concat(parts) if len(parts) > 1 else parts[0]

    def update(self, batch: DataProto) -> None:
        """Pass a step's batch with all its computed columns to the loader; call it after the step."""
        self.loader.update(batch)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the loader for the last batch."""
        return self.loader.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state and the rows of its last batch that were not taken, for a checkpoint."""
        rest = [] if self._rest is None else self.loader.last_rows[-len(self._rest) :]
        return {**self.loader.state_dict(), REST: rest} if rest else self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved state.

        Raises:
            DataError: the state belongs to other data, or was written by an older megarl within a batch.
        """
        if "taken" in state:
            raise DataError(
                "an older megarl wrote the checkpoint within a batch of the data; resume it with that version",
                code="resume.old-loader-state",
            )
        self.loader.load_state_dict({name: value for name, value in state.items() if name != REST})
        self.loader.last_rows = rest = list(state.get(REST, ()))
        self._batches, self._rest = iter(()), self.loader.rows(rest) if rest else None
        self._rest_ends_epoch = bool(rest) and not state["position"]  # the loader is in the next epoch already

    def _next_batch(self) -> DataProto:
        self._rest_ends_epoch = False
        batch = next(self._batches, None)
        while batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches, None)
        return batch
