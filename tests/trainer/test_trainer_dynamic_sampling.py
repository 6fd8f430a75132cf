"""Dynamic sampling: rounds of generation, dropped groups, ReMax baselines, best of n, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expected_errors import raises

from megarl.base.errors import StepImpossible
from megarl.base.reductions import Total
from megarl.config import TrainConfig
from megarl.data import DataProto
from megarl.trainer.phases.dynamic_sampling import SampleCollector, join, keep_best, split_baselines

GROUPS = {"actor_rollout_ref.rollout.n": 2, "algorithm.adv_estimator": "grpo", "data.train_batch_size": 4}
GROUPS["actor_rollout_ref.actor.ppo_mini_batch_size"] = 4
FILTER = GROUPS | {"algorithm.filter_groups.enable": True}
SOME = {"data.val_files": [], "trainer.test_freq": -1}


def samples(groups: dict[str, list[float | None]], **columns: list[Any]) -> DataProto:
    """Scored samples of three tokens each; None = the reward failed."""
    scores = [score for group in groups.values() for score in group]
    table = torch.zeros(len(scores), 3)
    table[:, -1] = torch.tensor([score or 0.0 for score in scores])
    mask = torch.ones(len(scores), 3, dtype=torch.int64)
    mask[[row for row, score in enumerate(scores) if score is None]] = 0
    tensors = {
        "token_level_scores": table,
        "response_mask": mask,
        "responses": torch.ones(len(scores), 3, dtype=torch.int64),
        "attention_mask": torch.ones(len(scores), 5, dtype=torch.int64),
        "prompts": torch.ones(len(scores), 2, dtype=torch.int64),
    }
    uids = [name for name, group in groups.items() for _ in group]
    return DataProto.from_dict(tensors, {"uid": uids, **columns})


def uids(batch: DataProto) -> list[str]:
    return batch.non_tensor_batch["uid"].tolist()


@pytest.fixture
def collector(train_config: Callable[..., TrainConfig]) -> Callable[..., SampleCollector]:
    return lambda **changes: SampleCollector(train_config(FILTER | SOME | changes))


def test_without_filter_a_step_has_one_round(train_config: Callable[..., TrainConfig]) -> None:
    steps = SampleCollector(train_config(GROUPS | SOME))
    batch = samples({name: [1.0, 1.0] for name in "abcd"})
    metrics: dict[str, float] = {}
    assert steps.add(batch, {"reward/failed": 0.0}) == 0
    assert uids(steps.finish(metrics)) == uids(batch) and metrics == {"reward/failed": 0.0}


def test_zero_variance_groups_are_replaced(collector: Callable[..., SampleCollector]) -> None:
    steps, metrics = collector(), {}
    # Two of four groups have varied scores; a group with a single score does not.
    first = samples({"a": [1, 0], "b": [1, 1], "c": [None, 1.0], "d": [0, 1]})
    assert (
        steps.add(first, {"reward/failed": Total(1), "x/mean": 1.0}) == 4
    )  # half of the prompts are kept, two are missing
    assert steps.rounds == 1
    second = samples({"e": [0, 0], "f": [0, 1], "g": [1, 0], "h": [0.5, 0]})
    assert steps.add(second, {"reward/failed": Total(2), "x/mean": 2.0}) == 0
    batch = steps.finish(metrics)
    assert uids(batch) == ["a", "a", "d", "d", "f", "f", "g", "g"]
    assert metrics["train/num_gen_batches"] == 2 and metrics["filter_groups/asked"] == 8
    assert metrics["filter_groups/dropped"] == 3 and metrics["filter_groups/surplus"] == 1
    assert metrics["filter_groups/efficiency"] == 0.5 and metrics["filter_groups/filled"] == 0
    assert metrics["reward/failed"] == 3 and metrics["x/mean"] == 1.5
    assert batch.meta_info["generated_tokens"] == 16 * 3
    assert steps.rounds == 0  # ready for the next step


def test_later_rounds_are_sized_by_the_share_of_kept_groups(collector: Callable[..., SampleCollector]) -> None:
    steps = collector(**{"data.gen_batch_size": 8})
    assert steps.round_size == 8
    assert steps.add(samples({str(i): [0, int(i < 3)] for i in range(8)}), {}) == 3  # 3 of 8 kept, 1 missing: 2.67
    assert collector().add(samples({name: [1, 1] for name in "abcd"}), {}) == 4  # no group was kept yet


@pytest.mark.parametrize("way", ["stop", "fill"])
def test_shortage_stops_or_fills_the_batch(collector: Callable[..., SampleCollector], way: str) -> None:
    limits = {"algorithm.filter_groups.max_num_gen_batches": 2, "algorithm.filter_groups.on_shortage": way}
    steps, metrics = collector(**limits), {}
    assert steps.add(samples({"a": [1, 0], "b": [1, 1]}), {}) > 0
    assert steps.add(samples({"c": [1, 1], "d": [0, 0]}), {}) == 0
    if way == "stop":
        with raises("algorithm.too-few-groups", error=StepImpossible) as caught:
            steps.finish(metrics)
        assert str(caught.value) == (
            "2 rounds of generation (algorithm.filter_groups.max_num_gen_batches=2) sampled 4 prompts, and the samples "
            "of only 1 of them differ in score; data.train_batch_size=4 are needed. The task is too easy or too hard "
            "for the policy: change the data, allow more rounds, or set algorithm.filter_groups.on_shortage=fill "
            "[algorithm.too-few-groups]"
        )
    else:
        assert uids(steps.finish(metrics)) == [name for name in "abcd" for _ in range(2)]
        assert metrics["filter_groups/filled"] == 3 and metrics["filter_groups/efficiency"] == 0.25


def test_groups_are_filtered_by_a_number_of_the_reward_function(collector: Callable[..., SampleCollector]) -> None:
    steps = collector(**{"algorithm.filter_groups.metric": "acc"})
    groups = {"a": [1.0, 0.5], "b": [1.0, 1.0]}
    steps.add(samples(groups, reward_extra_acc=[True, True, 0.0, 1.0]), {})
    steps.add(samples(groups | {"c": [0, 0]}, reward_extra_acc=[0, 1, 1, 0, 1, 0]), {})
    assert uids(steps.finish({})) == ["b", "b", "a", "a", "b", "b", "c", "c"]
    with raises("algorithm.no-filter-metric", "algorithm.filter_groups.metric='acc'", "['f1']"):
        steps.add(samples(groups, reward_extra_f1=[1, 2, 3, 4]), {})


def test_greedy_samples_become_the_baselines_of_their_prompts() -> None:
    groups = {"a": [1.0, 0.0, 0.25], "b": [0.0, 1.0, None]}
    batch = samples(groups, is_baseline=[False, False, True] * 2)
    rest, metrics = split_baselines(batch)
    assert uids(rest) == ["a", "a", "b", "b"] and "is_baseline" not in rest.non_tensor_batch
    assert rest.tensors["reward_baselines"].tolist() == [0.25, 0.25, 0.0, 0.0]
    assert rest.tensors["response_mask"].any(-1).tolist() == [True, True, False, False]  # b has no baseline
    assert metrics == {"reward_baselines/mean": 0.25, "reward_baselines/failed": 1.0}


def test_best_of_n_keeps_the_best_and_masks_bad_samples() -> None:
    metrics: dict[str, float] = {}
    batch = samples({"a": [0.0, 1.0, 0.5], "b": [None, 0.25, 0.0]})
    kept = keep_best(batch, 2, 0.2, metrics)
    assert kept.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 0.5, 0.25, 0.0]
    assert kept.tensors["response_mask"].any(-1).tolist() == [True, True, True, False]
    assert metrics == {"best_of_n/all/mean": 0.35, "best_of_n/kept/mean": 0.4375, "best_of_n/masked": 1.0}


def test_a_column_missing_in_a_round_is_none_there() -> None:
    joined = join([samples({"a": [1.0]}, reward_extra_x=[3]), samples({"b": [0.0]})])
    assert joined.non_tensor_batch["reward_extra_x"].tolist() == [3, None]


@pytest.mark.parametrize(
    ("changes", "code", "path"),
    [
        ({"algorithm.filter_groups.enable": True}, "algorithm.group-of-one", "actor_rollout_ref.rollout.n"),
        (
            FILTER | {"algorithm.filter_groups.metric": "seq_final_reward"},
            "algorithm.filter-metric",
            "algorithm.filter_groups.metric",
        ),
        ({"data.gen_batch_size": 5}, "algorithm.rounds-without-filter", "data.gen_batch_size"),
        (
            GROUPS | {"algorithm.best_of_n.enable": True, "algorithm.best_of_n.keep": 2},
            "algorithm.best-of-n-keep",
            "algorithm.best_of_n.keep",
        ),
    ],
)
def test_invalid_combinations_are_config_errors(
    train_config: Callable[..., TrainConfig], changes: dict[str, Any], code: str, path: str
) -> None:
    with raises(code, f"{path}="):
        train_config(changes)


def test_updates_train_on_the_kept_samples(train_config: Callable[..., TrainConfig]) -> None:
    config = train_config(GROUPS | {"actor_rollout_ref.rollout.n": 8, "algorithm.best_of_n.enable": True})
    assert config.samples_per_prompt == 1
