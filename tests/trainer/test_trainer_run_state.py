"""Where a run stands: what is due, and which prompts remain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megarl.algorithms import make_kl_controller
from megarl.config import TrainConfig
from megarl.data import DataProto, StatefulLoader
from megarl.trainer.run_state import RunState, find_resume, fingerprints


def loader() -> StatefulLoader:
    """10 rows in batches of 3, the last row left out: three batches an epoch."""

    def collate(rows: list[int]) -> DataProto:
        return DataProto.from_dict({"row": torch.tensor(rows)})

    return StatefulLoader(list(range(10)), 3, collate, seed=5)


def run_state(train_config: Callable[..., TrainConfig], total_steps: int, source: StatefulLoader) -> RunState:
    return RunState(train_config(), source, make_kl_controller("fixed", 0.1, 0.1, 1), total_steps, None)


def rows(prompts: DataProto) -> list[int]:
    return prompts.tensors["row"].tolist()


def test_epoch_after_epoch_until_the_last_step(train_config: Callable[..., TrainConfig]) -> None:
    state = run_state(train_config, 8, loader())
    seen = []
    for number, prompts in enumerate(state.remaining_prompts(), start=1):
        assert state.step == number and state.is_last_step == (number == 8)
        assert state.loader.epoch == (number - 1) // 3
        seen.append(rows(prompts))
    assert len(seen) == 8
    epochs = [[row for batch in seen[start : start + 3] for row in batch] for start in (0, 3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs) and epochs[0] != epochs[1]
    assert list(state.remaining_prompts()) == []


@pytest.mark.parametrize("done", [1, 3, 4, 6, 8])
def test_a_run_continues_with_the_prompts_that_remain(train_config: Callable[..., TrainConfig], done: int) -> None:
    whole = [rows(prompts) for prompts in run_state(train_config, 8, loader()).remaining_prompts()]
    first = run_state(train_config, 8, loader())
    for _ in first.remaining_prompts():
        if first.step == done:
            saved = first.loader.state_dict()
            break
    second = run_state(train_config, 8, loader())
    second.loader.load_state_dict(saved)
    second.step = done
    assert [rows(prompts) for prompts in second.remaining_prompts()] == whole[done:]
    assert second.step == 8


@pytest.mark.parametrize(
    ("every", "total", "due"),
    [(-1, 7, []), (1, 3, [1, 2, 3]), (3, 7, [3, 6, 7]), (3, 6, [3, 6]), (10, 7, [7])],
)
def test_due_every_so_often_and_after_the_last(
    train_config: Callable[..., TrainConfig], every: int, total: int, due: list[int]
) -> None:
    state = run_state(train_config, total, loader())
    found = []
    for state.step in range(1, total + 1):
        if state.due(every):
            found.append(state.step)
    assert found == due


def test_nothing_to_continue_from(train_config: Callable[..., TrainConfig]) -> None:
    assert find_resume(train_config()) is None


def test_fingerprints_of_what_learns(train_config: Callable[..., TrainConfig]) -> None:
    assert set(fingerprints(train_config())) == {"actor", "critic"}
    prints = fingerprints(train_config({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}))
    assert set(prints) == {"actor"} and prints["actor"]["hidden_size"] == 32
