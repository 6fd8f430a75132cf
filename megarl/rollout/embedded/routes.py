"""Experts of each token of the running sequences, for routing replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.model_config import Experts


class RouteTable:
    """Records the experts of each token, by lane of the running request and position."""

    def __init__(self, experts: Experts, lanes: int, device: torch.device) -> None:
        self._shape, self._device = (sum(experts.layers), experts.per_token), device
        self._table = torch.zeros(lanes, 0, *self._shape, dtype=torch.int16, device=device)

    def new(self, count: int) -> Tensor:
        """Allocate routes ``[count, expert layers, per token]`` for the decoder to fill in."""
        return torch.empty(count, *self._shape, dtype=torch.int16, device=self._device)

    def begin(self, lane: int, parts: Sequence[Tensor]) -> None:
        """Store the routes of a lane's prompt, in parts."""
        routes = torch.cat(list(parts))
        self._widen(len(routes))
        self._table[lane, : len(routes)] = routes

    def store(self, lanes: Tensor, positions: Tensor, routes: Tensor, width: int) -> None:
        """Store the routes of one token of each lane.

        Args:
            lanes: ``[tokens]``.
            positions: ``[tokens]``.
            routes: ``[tokens, expert layers, per token]``.
            width: number above every position.
        """
        self._widen(width)
        self._table[lanes, positions] = routes

    def read(self, lane: int, first: int, stop: int) -> np.ndarray:
        """Return the routes of a lane's positions ``first .. stop - 1``."""
        routes: np.ndarray = self._table[lane, first:stop].cpu().numpy().copy()
        return routes

    def _widen(self, width: int) -> None:
        """Make room for at least ``width`` positions, doubling the table so that this is rare."""
        if width > self._table.shape[1]:
            self._table = F.pad(
                self._table, (0, 0, 0, 0, 0, max(width, 2 * self._table.shape[1]) - self._table.shape[1])
            )
