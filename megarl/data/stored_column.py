"""A stored column of a batch: ragged, as a padded tensor, or both; a cache limits the copies."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from megarl.data.columns import Column
from megarl.data.ragged import RaggedColumn, without_padding
from megarl.data.remote import RemoteValues

VIEW_BYTES = 1 << 30
"""Limit of the memory of padded views and fetched values of ragged columns, over all batches of a process."""


class StoredColumn:
    """A column of a batch: ragged, as a padded tensor, or both. Batches share it.

    Args:
        view: the tensor.
        ragged: the same without padding.
    """

    def __init__(self, view: Tensor | None = None, ragged: RaggedColumn | None = None) -> None:
        self._view, self._ragged = view, ragged
        self._fetched: RaggedColumn | None = None
        self._version = 0
        self._dropped: weakref.ref[Tensor] | None = None

    @property
    def meta(self) -> Tensor:
        """A tensor of the padded shape and dtype without data."""
        if self._ragged is not None:
            return torch.empty(self._ragged.shape, dtype=self._ragged.torch_dtype, device="meta")
        assert self._view is not None
        return torch.empty(self._view.shape, dtype=self._view.dtype, device="meta")

    def tensor(self) -> Tensor:
        """Return the padded tensor: the same object while somebody holds it."""
        if self._view is None and self._dropped is not None:
            self._view = self._dropped()
        if self._view is None:
            self._set_view(self.local().padded())
        assert self._view is not None
        view = self._view
        if self._ragged is not None:
            self._use()
        return view

    def current(self) -> RaggedColumn | None:
        """Return the ragged column; None if there is none, or if its tensor was changed in place since."""
        view = self._view
        if view is None and self._dropped is not None:
            view = self._dropped()
        if self._ragged is not None and view is not None and _changes(view) != self._version:
            self._view, self._ragged, self._fetched = view, None, None
        return self._ragged

    def local(self) -> RaggedColumn:
        """Return the ragged column with its values in this process: fetched at the first read if they are remote."""
        assert self._ragged is not None
        if not isinstance(self._ragged.values, RemoteValues):
            self._ragged = self._ragged.joined()
            return self._ragged
        if self._fetched is None:
            self._fetched = self._ragged._replace(values=self._ragged.array())
        fetched = self._fetched
        self._use()
        return fetched

    def move_out(self, values: RemoteValues) -> None:
        """Replace the values of the ragged column by equal remote values; an array in this process becomes a cache."""
        assert self._ragged is not None
        self._fetched = self._ragged if isinstance(self._ragged.values, np.ndarray) else None
        self._ragged = self._ragged._replace(values=values)
        self._use()

    def flat(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the ragged column in a dtype, by default its own; possibly a view."""
        local = self.local()
        if isinstance(local.values, np.ndarray) and not local.values.flags.writeable:
            local = local._replace(values=local.values.copy())
            if self._ragged is not None and isinstance(self._ragged.values, RemoteValues):
                self._fetched = local
            else:
                self._ragged = local
        return local.flat(dtype)

    def to_ragged(self, column: Column, lengths: np.ndarray, starts: np.ndarray | None) -> RaggedColumn:
        """Return the ragged column; build it from the tensor if necessary.

        Args:
            column: declaration.
            lengths: ``[b]`` entries per row.
            starts: see :class:`RaggedColumn`.

        Raises:
            DataError: the padding contains several values.
        """
        ragged = self.current()
        if ragged is None:
            assert self._view is not None
            view = self._view
            ragged = without_padding(column, view.detach().cpu(), lengths, starts)
            if not (view.is_inference() or view.requires_grad):
                self._ragged = ragged
                self._set_view(view)
                self._use()
        return ragged

    def drop_view(self) -> None:
        """Free fetched values and the padded tensor, unless somebody else holds them or has changed the tensor."""
        if self.current() is not None:
            self._fetched = None
            if self._view is not None:
                self._dropped, self._view = weakref.ref(self._view), None

    def _use(self) -> None:
        """Record a read with the bytes that :meth:`drop_view` would free."""
        fetched = None if self._fetched is None else self._fetched.values
        copies = [fetched if isinstance(fetched, np.ndarray) else None, self._view]
        VIEWS.use(self, sum(copy.nbytes for copy in copies if copy is not None))

    def _set_view(self, view: Tensor) -> None:
        self._view, self._version, self._dropped = view, _changes(view), None


def _changes(tensor: Tensor) -> int:
    """Number of changes in place; they are not counted in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class ViewCache:
    """Drops the views that were read longest ago, once their memory exceeds the limit.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[int, tuple[weakref.ref[StoredColumn], int]] = OrderedDict()

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in list(self._entries.values()))

    def use(self, column: StoredColumn, size: int) -> None:
        """Record a read of a view."""
        key = id(column)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            if entry[1] == size:
                return
        reference = weakref.ref(column, lambda _: self._entries.pop(key, None)) if entry is None else entry[0]
        self._entries[key] = reference, size
        while self._bytes > self.limit and len(self._entries) > 1:
            # At once: a column may die between a look at the oldest entry and its removal.
            _, (oldest, _) = self._entries.popitem(last=False)
            stored = oldest()
            if stored is not None:
                stored.drop_view()


VIEWS = ViewCache(VIEW_BYTES)
