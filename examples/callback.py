"""A callback: adds a metric to each step, and lists the complete checkpoints in `saves.txt` of the run's folder.

megarl train --config-name quickstart_grpo 'trainer.callbacks=[examples/callback.py:GroupSpread]'
"""

from __future__ import annotations

import numpy as np

from megarl.trainer.callbacks import Callback, TrainerView


class GroupSpread(Callback):
    """Reports the mean standard deviation of the scores of a group as ``custom/group_score_std``."""

    def on_step_end(self, view: TrainerView) -> dict[str, float]:
        """Return the metric of the step; it is logged with the others."""
        assert view.batch is not None
        scores = view.batch.padded("token_level_scores").sum(-1).double().numpy()
        groups = view.batch.non_tensor_batch["uid"]
        return {"custom/group_score_std": float(np.mean([scores[groups == group].std() for group in set(groups)]))}

    def on_save(self, view: TrainerView) -> None:
        """Append the folder of a complete checkpoint to ``saves.txt``."""
        with (view.folder / "saves.txt").open("a", encoding="utf-8") as file:
            file.write(f"{view.checkpoint}\n")
