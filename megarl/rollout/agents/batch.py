"""Trajectories as a batch: the columns that rewards, advantages and updates read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.rollout.agents.loop import Trajectory


def trajectories_to_batch(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, state_masking: bool = True
) -> DataProto:
    """The trajectories as rows, in their order.

    ``attention_mask`` covers every token: the environment's stay in the context. ``response_mask`` says which are
    trained on, and so may have holes. A trajectory that failed keeps its row, with nothing to train on; a response
    without a token gets one of padding, for a row has to have one.

    Args:
        trajectories: as the runner returned them.
        pad_token_id: fills the rectangles.
        state_masking: leave the environment's tokens out of losses, KL, advantages and entropy; without, they are
            trained on like the policy's own.

    Returns:
        ``prompts``, ``responses``, ``attention_mask``, ``response_mask``, ``generated_mask``, ``rollout_log_probs``
        (0.0 for tokens of the environment), and the columns ``num_turns``, ``weight_version``, ``agent_error`` (None:
        it did not fail) and what ``fields`` name.
    """
    prompts = [list(trajectory.prompt_ids) or [pad_token_id] for trajectory in trajectories]
    responses = [list(trajectory.response_ids) or [pad_token_id] for trajectory in trajectories]
    masks = [_mask(trajectory, state_masking) for trajectory in trajectories]
    tensors = {
        "prompts": pad_left(prompts, pad_token_id),
        "responses": pad_right(responses, pad_token_id),
        "response_mask": pad_right(masks),
        "generated_mask": pad_right([list(trajectory.generated_mask) or [0] for trajectory in trajectories]),
        "rollout_log_probs": pad_right(
            [list(trajectory.log_probs) or [0.0] for trajectory in trajectories], dtype=torch.float32
        ),
    }
    tensors["attention_mask"] = attention_mask_of(
        list(map(len, prompts)),
        list(map(len, responses)),
        tensors["prompts"].shape[1],
        tensors["responses"].shape[1],
    )
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.fields)
    others = {name: [trajectory.fields.get(name) for trajectory in trajectories] for name in names}
    others["num_turns"] = [trajectory.num_turns for trajectory in trajectories]
    others["weight_version"] = [trajectory.weight_version for trajectory in trajectories]
    others["agent_error"] = [trajectory.error for trajectory in trajectories]
    return DataProto.from_dict(tensors, others)


def _mask(trajectory: Trajectory, state_masking: bool) -> list[int]:
    length = len(trajectory.response_ids)
    if trajectory.error is not None or not length:
        return [0] * max(length, 1)
    return list(trajectory.generated_mask) if state_masking else [1] * length
