"""Batches from a data set, in an order that a run can be resumed in at any step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl.data.protocol import DataProto
from megarl.errors import DataError

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[int]):
    """Row numbers of one epoch: in file order, or shuffled by ``(seed, epoch)`` and by nothing else."""

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.rows))
        # both as entropy, not their sum: neighbouring seeds would share their orders
        return iter(np.random.default_rng([self.seed, self.epoch]).permutation(self.rows).tolist())


class StatefulLoader:
    """Iterates over one epoch of batches at a time, and continues exactly where a saved state left off.

    Each pass of a ``for`` loop is one epoch; after it ``epoch`` has grown by one. The state counts batches that have
    been handed out: save it after the step that used the batch.

    Args:
        dataset: map-style data set.
        batch_size: rows per batch; None for all rows in one batch.
        collate: turns the rows of a batch into a :class:`DataProto`.
        seed: the order of an epoch is a function of seed and epoch alone.
        shuffle: False keeps the order of the files.
        drop_last: leave out the rows of an epoch that do not fill a batch (told at start and in ``dropped_per_epoch``).

    Attributes:
        epoch: epoch that the next batch belongs to, from 0.
        dropped_per_epoch: rows that ``drop_last`` leaves out of each epoch, other ones in each if shuffled.

    Raises:
        DataError: the data set is empty, or smaller than one batch with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | None,
        collate: Callable[[list[Any]], DataProto],
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        assert isinstance(dataset, Sized)  # map-style
        rows = len(dataset)
        size = batch_size or rows
        if rows == 0 or (drop_last and rows < size):
            raise DataError(
                f"the data set has {rows} rows, a batch needs {size}; add rows, or lower data.train_batch_size"
            )
        self.epoch = 0
        self.dropped_per_epoch = rows % size if drop_last else 0
        if self.dropped_per_epoch:
            logger.warning(
                "%d of %d rows are left out of each epoch: they fill no batch of %d", self.dropped_per_epoch, rows, size
            )
        self._identity = {"rows": rows, "batch_size": size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        self._position = 0
        self._restored = False
        self._sampler = EpochSampler(rows, seed, shuffle)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's, nothing to act on
            self._loader = StatefulDataLoader(
                dataset,
                batch_size=size,
                sampler=self._sampler,
                collate_fn=collate,
                drop_last=drop_last,
                num_workers=0,
                # torch would draw a worker seed from the global generator, and so change what the run draws next
                generator=torch.Generator().manual_seed(seed),
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[DataProto]:
        """Batches of the current epoch: all of them, or after :meth:`load_state_dict` those that remain."""
        if not self._restored:
            self.epoch += self._position == len(self)  # a loop that was left after its last batch
            self._position = 0
        self._restored = False
        self._sampler.epoch = self.epoch
        for batch in self._loader:
            self._position += 1
            yield batch
        self.epoch += 1
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: plain values, for a checkpoint."""
        if self._position == 0 or self._position == len(self):
            return {**self._identity, "epoch": self.epoch + bool(self._position), "position": 0, "loader": None}
        state = {"epoch": self.epoch, "position": self._position, "loader": self._loader.state_dict()}
        return {**self._identity, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            DataError: the state is from other data, another batch size or another order, so that it means other rows.
        """
        for name, value in self._identity.items():
            if state[name] != value:
                raise DataError(
                    f"the saved loader state has {name}={state[name]}, this run has {value}; resume with the same "
                    "data, batch size and seed, or start anew with trainer.resume_mode=disable"
                )
        self.epoch, self._position = state["epoch"], state["position"]
        self._restored = True
        self._sampler.epoch = self.epoch
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
