"""Trajectories as a batch: its columns, its metrics, and the report of failed conversations."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megarl.agents.types import AgentError, Integers, SampleId, Trajectory, narrow_ids
from megarl.base.reductions import Largest, Smallest, Total
from megarl.data import DataProto
from megarl.data.column_store import ragged_columns
from megarl.data.ragged import Rows
from megarl.data.shared_prompts import DIGESTS, prompt_digests
from megarl.rewards.outcome import OUTCOME
from megarl.rollout.interface import no_support

logger = logging.getLogger(__name__)

ACTIONS, VALID_ACTIONS = "env/actions", "env/valid_actions"
LED_AGAIN = "agent/led_again"
VALID_SEARCHES, FINISHED = "env/valid_searches", "env/finished"


def report_failures(trajectories: Sequence[Trajectory]) -> None:
    """Log the number of failed conversations.

    Raises:
        AgentError: all conversations failed.
    """
    errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    if errors and len(errors) == len(trajectories):
        text = f"all {len(errors)} conversations failed; the first: {errors[0]}"
        raise AgentError(text, code="agent.all-conversations-failed")
    if errors:
        logger.warning("%d of %d conversations failed; the first: %s", len(errors), len(trajectories), errors[0])


RAGGED = {
    "prompt_ids": np.int64,
    "response_ids": np.int64,
    "response_mask": np.int8,
    "log_probs": np.float32,
    "weight_versions": np.int32,
    "unmasked": np.int8,
}
"""Fields of a trajectory with one value per token, and their types in other processes; ids without images are
int32."""


class PackedSamples:
    """Trajectories by sample as ragged columns, cheap to send to another process."""

    def __init__(self, samples: Mapping[SampleId, Trajectory]) -> None:
        self._names, trajectories = list(samples), list(samples.values())
        self._columns = {name: _ragged([getattr(t, name) for t in trajectories], RAGGED[name]) for name in RAGGED}
        for name in ("prompt_ids", "response_ids"):
            ids, ends = self._columns[name]
            self._columns[name] = narrow_ids(ids), ends
        # The rest of each trajectory, without its tokens.
        empty = dict.fromkeys(RAGGED, ())
        self._rest = [{**vars(trajectory), **empty} for trajectory in trajectories]

    def unpack(self) -> dict[SampleId, Trajectory]:
        """Return the trajectories, with NumPy arrays per token."""
        rows = {name: np.split(values, ends[:-1]) for name, (values, ends) in self._columns.items()}
        return {
            name: Trajectory(**{**rest, **{column: rows[column][row] for column in RAGGED}})
            for row, (name, rest) in enumerate(zip(self._names, self._rest, strict=True))
        }


def _ragged(rows: Sequence[Integers | Sequence[float]], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Join the rows' values; return them and each row's end."""
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return np.fromiter(itertools.chain.from_iterable(rows), dtype, int(ends[-1]) if rows else 0), ends


def trajectories_to_batch(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    *,
    state_masking: bool = True,
    with_versions: bool = False,
    with_routes: bool = False,
    support_tokens: int = 0,
) -> DataProto:
    """Convert trajectories into a batch, one row per trajectory, in their order.

    ``attention_mask`` covers every token, including the environment's. ``response_mask`` marks the tokens to train on
    and may have holes. A failed trajectory keeps its row with a mask of zeros. An empty response gets one padding
    token, since a row needs at least one.

    Args:
        state_masking: exclude the environment's tokens from losses, KL, advantages and entropy; False trains on them as
            on the policy's tokens, except on tokens of images.
        with_versions: add the column ``weight_versions``, for asynchronous training.
        with_routes: add the column ``routed_experts``, for routing replay R3.
        support_tokens: add the column ``support_ids`` of this width; 0 = do not.

    Returns:
        ``prompts [b, P]``, ``responses``, ``response_mask``, ``generated_mask``, ``rollout_log_probs`` (0.0 for the
        environment's tokens) ``[b, R]``, ``attention_mask [b, P+R]`` and ``prompt_digests [b]``; with ``with_versions``
        also ``weight_versions [b, R]``; with ``with_routes`` also ``routed_experts [b, P+R, expert layers, per
        token]``; with ``support_tokens`` also ``support_ids [b, R, support_tokens]``; the columns ``num_turns``,
        ``weight_version``, ``finish_reason``, ``agent_error`` (None: no failure) and one column per name in ``fields``;
        :data:`OUTCOME` if a trajectory has an outcome.
    """
    prompts = [_nonempty(trajectory.prompt_ids, pad_token_id) for trajectory in trajectories]
    responses = [_nonempty(trajectory.response_ids, pad_token_id) for trajectory in trajectories]
    masks = [_train_mask(trajectory, state_masking) for trajectory in trajectories]
    rows: dict[str, Rows] = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": masks,
        "generated_mask": [_nonempty(trajectory.generated_mask, 0) for trajectory in trajectories],
        "rollout_log_probs": [_nonempty(trajectory.log_probs, 0.0) for trajectory in trajectories],
    }
    if with_versions:
        rows["weight_versions"] = [_versions(trajectory) for trajectory in trajectories]
    if with_routes:
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        rows["routed_experts"] = _routes(trajectories, lengths)
    if support_tokens:
        rows["support_ids"] = [_support(trajectory, support_tokens) for trajectory in trajectories]
    tensors = ragged_columns(rows, {"prompts": pad_token_id, "responses": pad_token_id})
    tensors = tensors.merged({DIGESTS: prompt_digests(prompts)})
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.fields)
    columns = {name: [trajectory.fields.get(name) for trajectory in trajectories] for name in names}
    columns["num_turns"] = [trajectory.num_turns for trajectory in trajectories]
    columns["weight_version"] = [trajectory.weight_version for trajectory in trajectories]
    columns["finish_reason"] = [trajectory.finish_reason for trajectory in trajectories]
    columns["agent_error"] = [trajectory.error for trajectory in trajectories]
    if any(trajectory.outcome is not None for trajectory in trajectories):
        columns[OUTCOME] = [trajectory.outcome for trajectory in trajectories]
    return DataProto.from_dict(tensors, columns)


def _nonempty(values: Sequence[float] | np.ndarray, default: float) -> Sequence[float] | np.ndarray:
    return values if len(values) else [default]


def _versions(trajectory: Trajectory) -> Integers:
    """Weight version of each response token."""
    if len(trajectory.weight_versions):
        return trajectory.weight_versions
    return [trajectory.weight_version] * max(len(trajectory.response_ids), 1)


def _support(trajectory: Trajectory, width: int) -> np.ndarray:
    """Tokens that each response token was sampled from.

    Raises:
        AgentError: they are unknown, as for a sample of an earlier run with other settings.
    """
    length = len(trajectory.response_ids)
    if trajectory.error is not None or not length:
        return no_support(max(length, 1), width)
    if trajectory.support is None or trajectory.support.shape != (length, width):
        raise AgentError(
            f"a sample has no support of {width} tokens: it was generated with another top_k or support of "
            "actor_rollout_ref.rollout; resume with the former settings",
            code="rollout.no-support",
        )
    return trajectory.support


def _routes(trajectories: Sequence[Trajectory], lengths: Sequence[int]) -> list[np.ndarray]:
    """Experts of each row's tokens; -1 for tokens that the engine has not computed, as the last one.

    Raises:
        AgentError: no trajectory has experts.
    """
    example = next((trajectory.routes for trajectory in trajectories if trajectory.routes is not None), None)
    if example is None:
        raise AgentError(
            "the rollout engine returned no experts, which actor.router_replay.mode=R3 replays; set R2 to replay those "
            "of the pass for old log-probs",
            code="rollout.no-routes",
        )
    rows = [np.full((length, *example.shape[1:]), -1, np.int16) for length in lengths]
    for row, trajectory in zip(rows, trajectories, strict=True):
        if trajectory.routes is not None:
            row[: len(trajectory.routes)] = trajectory.routes
    return rows


def _train_mask(trajectory: Trajectory, state_masking: bool) -> Integers:
    length = len(trajectory.response_ids)
    if trajectory.error is not None or not length:
        return [0] * max(length, 1)
    return trajectory.generated_mask if state_masking else np.asarray(trajectory.response_ids) >= 0


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of trajectories, under verl's and Search-R1's names.

    - ``num_turns/{mean,max,min}``: messages per conversation, including the prompt.
    - ``tool_call_counts/{mean,max,min}``: tool calls per conversation; ``tool_call_counts/malformed_ratio``: share of
      all calls that were answered with an error.
    - ``env/number_of_actions/{mean,max,min}``: turns of the policy per searching conversation; ``env/finish_ratio``:
      share of conversations with an answer; ``env/number_of_valid_action``, ``env/number_of_valid_search``: per
      conversation; ``env/ratio_of_valid_action``: share of valid turns, mean over conversations.
    - ``state_tokens/{total,coverage}``: generated tokens, and their share of all response tokens.
    - ``rollout/support_size/{mean,max}``: tokens that a generated token was sampled from, with ``rollout.support``.
    - ``agent/failed``: failed conversations; they are excluded from all other metrics.
    - ``agent/led_again``: conversations of a resumed run that took another way than their stored turns.
    - ``agent/<name>/mean``: any other number reported by loops and tools.
    """
    succeeded = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics: dict[str, float] = {"agent/failed": Total(len(trajectories) - len(succeeded))}
    metrics |= _mean_max_min("num_turns", [float(trajectory.num_turns) for trajectory in succeeded])
    names = dict.fromkeys(name for trajectory in succeeded for name in trajectory.metrics)
    for name in names:
        rows = [trajectory.metrics for trajectory in succeeded if name in trajectory.metrics]
        metrics |= _SPECIAL[name](rows) if name in _SPECIAL else {f"agent/{name}/mean": _mean(rows, name)}
    return metrics | _state_tokens(succeeded) | _support_size(succeeded)


_Rows = Sequence[Mapping[str, float]]


def _state_tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    generated = sum(int(np.sum(trajectory.response_mask, dtype=np.int64)) for trajectory in trajectories)
    total = sum(len(trajectory.response_mask) for trajectory in trajectories)
    return {"state_tokens/total": Total(generated), "state_tokens/coverage": generated / total} if total else {}


def _support_size(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    sizes = [(trajectory.support >= 0).sum(-1) for trajectory in trajectories if trajectory.support is not None]
    joined = np.concatenate(sizes) if sizes else np.zeros(0)
    generated = joined[joined > 0]  # the environment's tokens have none
    if not len(generated):
        return {}
    name = "rollout/support_size"
    return {f"{name}/mean": float(generated.mean()), f"{name}/max": Largest(float(generated.max()))}


def _mean_max_min(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": Largest(max(values)),
        f"{name}/min": Smallest(min(values)),
    }


def _values(rows: _Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _mean(rows: _Rows, name: str) -> float:
    return float(np.mean(_values(rows, name)))


def _valid_actions(rows: _Rows) -> dict[str, float]:
    valid, actions = np.array(_values(rows, VALID_ACTIONS)), np.array(_values(rows, ACTIONS))
    return {
        "env/number_of_valid_action": float(valid.mean()),
        "env/ratio_of_valid_action": float((valid / np.maximum(actions, 1)).mean()),
    }


def _malformed(rows: _Rows) -> dict[str, float]:
    calls = sum(_values(rows, "tool_call_counts"))
    return {"tool_call_counts/malformed_ratio": sum(_values(rows, "malformed_calls")) / calls} if calls else {}


_SPECIAL: dict[str, Callable[[_Rows], dict[str, float]]] = {
    "tool_call_counts": lambda rows: _mean_max_min("tool_call_counts", _values(rows, "tool_call_counts")),
    "malformed_calls": _malformed,
    ACTIONS: lambda rows: _mean_max_min("env/number_of_actions", _values(rows, ACTIONS)),
    VALID_ACTIONS: _valid_actions,
    VALID_SEARCHES: lambda rows: {"env/number_of_valid_search": _mean(rows, VALID_SEARCHES)},
    LED_AGAIN: lambda rows: {LED_AGAIN: Total(len(rows))},
    FINISHED: lambda rows: {"env/finish_ratio": _mean(rows, FINISHED)},
}
