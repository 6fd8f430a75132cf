"""A data set of one's own: of two kinds of conversations, half of the rows get one and half the other.

python -m megarl.train --config-name quickstart_grpo data.max_response_length=24 \
  data.custom_cls.path=examples/dataset.py data.custom_cls.name=HalfAskedTwice \
  actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/agent_loops.yaml
"""

from __future__ import annotations

from typing import Any

from megarl.data import RLHFDataset


class HalfAskedTwice(RLHFDataset):
    """Every other row is led by ``ask_twice``; the others by the run's default loop."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        """A row as the base reads it, with the name of its loop."""
        sample = super().__getitem__(item)
        return sample | {"agent_name": "ask_twice" if sample["index"] % 2 else None}
