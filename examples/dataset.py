"""A custom dataset: every other row uses another agent loop.

megarl train --config-name quickstart_grpo data.max_response_length=24 \
  data.custom_cls.path=examples/dataset.py data.custom_cls.name=HalfAskedTwice \
  actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/agent_loops.yaml
"""

from __future__ import annotations

from typing import Any

from megarl.data import RLHFDataset


class HalfAskedTwice(RLHFDataset):
    """Selects the loop ``ask_twice`` for every other row, and the default loop for the rest."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Return a row with the name of its agent loop."""
        sample = super().__getitem__(item)
        return sample | {"agent_name": "ask_twice" if sample["index"] % 2 else None}
