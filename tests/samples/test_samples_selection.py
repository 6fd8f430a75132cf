"""Selection of the samples to train on: groups without variance, ReMax baselines, best of n, and metrics."""

from __future__ import annotations

import pytest
import torch
from support.expected_errors import raises

from megarl.base.errors import StepImpossible
from megarl.base.reductions import Total
from megarl.data import DataProto
from megarl.rewards.manager import Scored
from megarl.samples.selection import GroupSelection, join, keep_best, split_baselines

GROUPS = {"actor_rollout_ref.rollout.n": 2, "algorithm.adv_estimator": "grpo", "data.train_batch_size": 4}
GROUPS["actor_rollout_ref.actor.ppo_mini_batch_size"] = 4
FILTER = GROUPS | {"algorithm.filter_groups.enable": True}
SOME = {"data.val_files": [], "trainer.test_freq": -1}


def samples(groups, **columns):
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


def uids(batch):
    return batch.non_tensor_batch["uid"].tolist()


def scored(selection, first, batch, metrics):
    numbers = range(first, first + len(batch) // 2)
    return selection.groups(numbers, Scored(batch, metrics, {}), {})


@pytest.fixture
def select(train_config):
    return lambda **changes: GroupSelection(train_config(FILTER | SOME | changes))


def test_without_filter_a_batch_keeps_its_rows(train_config):
    selection = GroupSelection(train_config(GROUPS | SOME))
    batch = samples({name: [1.0, 1.0] for name in "abcd"})
    groups = scored(selection, 4, batch, {"reward/failed": 0.0})
    assert list(groups.varied) == [4, 5, 6, 7]
    selected, metrics = selection.batch(dict.fromkeys(groups.numbers, groups), groups.numbers, {}, 0)
    assert uids(selected) == uids(batch) and metrics == {"reward/failed": 0.0}


def test_zero_variance_groups_are_dropped(select):
    selection = select()
    # Two of four groups have varied scores; a group with a single score does not.
    first = samples({"a": [1, 0], "b": [1, 1], "c": [None, 1.0], "d": [0, 1]})
    second = samples({"e": [0, 0], "f": [0, 1], "g": [1, 0], "h": [0.5, 0]})
    groups = [
        scored(selection, 0, first, {"reward/failed": Total(1), "x/mean": 1.0}),
        scored(selection, 4, second, {"reward/failed": Total(2), "x/mean": 2.0}),
    ]
    assert [sorted(part.varied) for part in groups] == [[0, 3], [5, 6, 7]]
    of_number = {number: part for part in groups for number in part.numbers}
    dropped = {number: part for number, part in of_number.items() if number not in part.varied}
    batch, metrics = selection.batch(of_number, [0, 3, 5, 6], dropped, 1)
    assert uids(batch) == ["a", "a", "d", "d", "f", "f", "g", "g"]
    assert metrics["train/num_gen_batches"] == 2 and metrics["filter_groups/asked"] == 7
    assert metrics["filter_groups/dropped"] == 3 and metrics["filter_groups/surplus"] == 1
    assert metrics["filter_groups/efficiency"] == 4 / 7 and metrics["filter_groups/filled"] == 0
    assert metrics["reward/failed"] == 3 and metrics["x/mean"] == 1.5
    assert batch.meta_info["generated_tokens"] == 16 * 3


def test_dropped_groups_fill_a_batch_or_stop_the_run(select):
    limits = {"algorithm.filter_groups.max_num_gen_batches": 2}
    selection = select(**limits)
    assert selection.max_dropped == 4 and select().max_dropped == float("inf")
    assert select(**limits, **{"data.gen_batch_size": 6}).max_dropped == 6
    with raises("algorithm.too-few-groups", "2 batches", "7 prompts", "only 1", error=StepImpossible):
        selection.fill(3, [1, 2, 3, 4, 5, 6])
    filling = select(**limits, **{"algorithm.filter_groups.on_shortage": "fill"})
    groups = scored(filling, 0, samples({"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [2, 2], "e": [3, 3]}), {})
    dropped = dict.fromkeys([4, 0, 2, 3], groups)
    assert filling.fill(3, list(dropped)) == [0, 2, 3]
    batch, metrics = filling.batch(dict.fromkeys(range(5), groups), [0, 1, 2, 3], dropped, 0)
    assert uids(batch) == [name for name in "abcd" for _ in range(2)]
    assert metrics["filter_groups/filled"] == 3 and metrics["filter_groups/efficiency"] == 0.2


def test_groups_are_filtered_by_a_number_of_the_reward_function(select):
    selection = select(**{"algorithm.filter_groups.metric": "acc"})
    groups = {"a": [1.0, 0.5], "b": [1.0, 1.0]}
    assert scored(selection, 0, samples(groups, reward_extra_acc=[True, True, 0.0, 1.0]), {}).varied == {1}
    more = samples(groups | {"c": [0, 0]}, reward_extra_acc=[0, 1, 1, 0, 1, 0])
    assert scored(selection, 0, more, {}).varied == {0, 1, 2}
    with raises("algorithm.no-filter-metric", "algorithm.filter_groups.metric='acc'", "['f1']"):
        scored(selection, 0, samples(groups, reward_extra_f1=[1, 2, 3, 4]), {})


def test_greedy_samples_become_the_baselines_of_their_prompts():
    groups = {"a": [1.0, 0.0, 0.25], "b": [0.0, 1.0, None]}
    batch = samples(groups, is_baseline=[False, False, True] * 2)
    rest, metrics = split_baselines(batch)
    assert uids(rest) == ["a", "a", "b", "b"] and "is_baseline" not in rest.non_tensor_batch
    assert rest.tensors["reward_baselines"].tolist() == [0.25, 0.25, 0.0, 0.0]
    assert rest.tensors["response_mask"].any(-1).tolist() == [True, True, False, False]  # b has no baseline
    assert metrics == {"reward_baselines/mean": 0.25, "reward_baselines/failed": 1.0}


def test_best_of_n_keeps_the_best_and_masks_bad_samples():
    metrics: dict[str, float] = {}
    batch = samples({"a": [0.0, 1.0, 0.5], "b": [None, 0.25, 0.0]})
    kept = keep_best(batch, 2, 0.2, metrics)
    assert kept.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 0.5, 0.25, 0.0]
    assert kept.tensors["response_mask"].any(-1).tolist() == [True, True, True, False]
    assert metrics == {"best_of_n/all/mean": 0.35, "best_of_n/kept/mean": 0.4375, "best_of_n/masked": 1.0}


def test_a_column_missing_in_a_batch_is_none_there():
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
def test_invalid_combinations_are_config_errors(train_config, changes, code, path):
    with raises(code, f"{path}="):
        train_config(changes)


def test_updates_train_on_the_kept_samples(train_config):
    config = train_config(GROUPS | {"actor_rollout_ref.rollout.n": 8, "algorithm.best_of_n.enable": True})
    assert config.samples_per_prompt == 1
