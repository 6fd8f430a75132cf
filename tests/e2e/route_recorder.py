"""A callback that writes each step's tokens with their experts and weight versions."""

from __future__ import annotations

import torch

from megarl.trainer.callbacks import Callback, TrainerView


class RouteRecorder(Callback):
    """Writes ``routes-<step>.pt``: of each row the prompt, the response, the experts and the weight versions."""

    def on_step_end(self, view: TrainerView) -> None:
        """Write the rows of a step."""
        assert view.batch is not None
        names = ("prompts", "responses", "routed_experts", "weight_versions")
        columns = {name: view.batch.unpadded(name) for name in names}
        torch.save([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
                   view.folder / f"routes-{view.step}.pt")  # fmt: skip
