"""Conversations of training and validation on a real rollout worker in this process, and idle ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_replica import EngineReplica
from support.expected_errors import raises

from megarl.agents.runner import AgentRunner
from megarl.agents.types import Trajectory
from megarl.base.seeds import derive_seed
from megarl.data.tokenizers import load_tokenizer
from megarl.rewards import FailurePolicy, RewardManager, in_driver
from megarl.rewards.outcome import OUTCOME
from megarl.samples.reward_functions import function_manager, runner_scorers
from megarl.samples.reward_phase import RewardPhase
from megarl.samples.rollouts import WAIT_S, IdleClock, Rollouts
from megarl.trainer.phases.data_loading import prompt_loader, validation_loader
from megarl.trainer.phases.validation import Validator
from megarl.workers.dispatch import WorkerPlace
from megarl.workers.rollout import RolloutWorker
from megarl.workers.settings import RolloutSettings
from tests.samples.phase_rewards import CALLS

FACTS = {"actor_mini_batch_rows": 8}
FUNCTIONS = Path(__file__).with_name("phase_rewards.py")


@pytest.fixture(scope="module")
def worker(arithmetic):
    from megarl.config import RolloutConfig

    settings = RolloutSettings(str(arithmetic / "model"), "cpu", RolloutConfig(dtype="float32"))
    worker = RolloutWorker(WorkerPlace(0, 1, "127.0.0.1", 0), settings=settings)
    worker.init_model()
    worker.engine.load_hf(str(arithmetic / "model"))
    return worker


@pytest.fixture
def phase(worker, train_config, arithmetic):
    runners: list[AgentRunner] = []

    def make(changes=None, rewards=None):
        """Build the phase; with the keys of ``rewards`` its samples are scored as they end."""
        changes = {f"actor_rollout_ref.rollout.{name}": value for name, value in (changes or {}).items()}
        config = train_config({**changes, **(rewards or {}), "data.max_response_length": 6})
        tokenizer = load_tokenizer(str(arithmetic / "model"))
        scorers = runner_scorers(config) if rewards else {}
        runners.append(AgentRunner(config, tokenizer, scorers=scorers))
        return Rollouts(runners[-1], lambda: {0: EngineReplica(worker.engine)}, config, tokenizer, FACTS)

    yield make
    for runner in runners:
        runner.shutdown()


@pytest.fixture
def prompts(train_config, arithmetic):
    config = train_config()
    loader = prompt_loader(config, load_tokenizer(str(arithmetic / "model")))
    return next(iter(loader))


def generate(rollouts, prompts, step, metrics=None):
    """The samples of a step of synchronous training."""
    groups = rollouts.training_groups(prompts, range(8 * (step - 1), 8 * (step - 1) + len(prompts)))
    names = [name for group in groups for name in group.ids]
    rollouts.submit(groups)
    ended: dict[Any, Trajectory] = {}
    while len(ended) < len(names):
        ended |= rollouts.finished(WAIT_S)
    batch, found = rollouts.batch_of(groups, [ended[name] for name in names])
    (metrics if metrics is not None else {}).update(found | rollouts.close().metrics())
    return batch


def responses(batch):
    return batch.tensors["responses"].tolist()


def test_samples_keep_the_columns_of_their_prompt(phase, prompts):
    batch = generate(phase({"n": 3}), prompts, 2, metrics := {})
    assert metrics["rollout/replicas_lost"] == 0 and 0 < metrics["rollout/replica_utilization/min"] <= 1
    assert len(batch) == 24 and batch.tensors["responses"].shape[1] <= 6
    for row in range(24):
        assert batch.non_tensor_batch["reward_model"][row] == prompts.non_tensor_batch["reward_model"][row // 3]
        assert batch.tensors["prompts"][row].tolist() == prompts.tensors["prompts"][row // 3].tolist()
    uids = batch.non_tensor_batch["uid"].tolist()
    assert [uids.index(uid) for uid in uids] == [row // 3 * 3 for row in range(24)]
    assert batch.meta_info["actor_mini_batch_rows"] == 8
    assert "sample_seed" not in batch.tensors


def test_a_step_is_reproducible_and_steps_differ(phase, prompts):
    first, second = (generate(phase(), prompts, step) for step in (1, 2))
    assert responses(first) == responses(generate(phase(), prompts, 1)) != responses(second)
    assert responses(first) != responses(generate(phase({"seed": 9}), prompts, 1))


def test_seeds_are_those_of_one_generator_wherever_they_begin(phase, prompts):
    """A place far beyond memory is found without drawing the numbers before it."""
    rollout = phase({"seed": 9})
    drawn = np.random.default_rng([9, 0, 4]).integers(0, 2**62, 100).tolist()
    places = [0, 1, 2, 17, 64, 98, 99, 2**50]
    groups = [
        rollout._group(0, rollout._seed((0, 4, place)), "", rollout._training_params, "", np.arange(3), {})
        for place in places
    ]
    seeds = [group.seeds for group in groups]
    assert seeds[:-1] == [[derive_seed(drawn[place], n) for n in range(len(seeds[0]))] for place in places[:-1]]
    assert len({seed for group in seeds for seed in group}) == 8 * len(seeds[0])


def test_equal_prompts_of_a_batch_get_independent_samples(phase, prompts):
    same = prompts[[0] * 8]
    assert len({tuple(ids) for ids in responses(generate(phase(), same, 1))}) > 1


def test_validation_uses_its_sampling_parameters(phase, prompts):
    greedy = phase()
    assert responses(greedy.validate(prompts, 1)) == responses(greedy.validate(prompts, 2))
    assert not greedy.validate(prompts, 1).meta_info.get("actor_mini_batch_rows")
    sampled = phase({"val_kwargs.temperature": 1.0, "val_kwargs.n": 2})
    batch = sampled.validate(prompts, 1)
    assert len(batch) == 16 and len(set(batch.non_tensor_batch["uid"])) == 8
    # Batches of one validation, and training, have streams of their own.
    other = sampled.validate(prompts, 1, batch=1)
    assert responses(batch) != responses(other) and responses(batch)[::2] != responses(generate(sampled, prompts, 1))
    assert not set(batch.non_tensor_batch["uid"]) & set(other.non_tensor_batch["uid"])


def test_validation_is_the_mean_score_of_all_held_out_prompts(phase, train_config, arithmetic):
    tokenizer = load_tokenizer(str(arithmetic / "model"))

    def reward(data_source, solution_str, ground_truth, extra_info):
        if ground_truth == failing:
            raise ValueError("no idea")
        return float(len(solution_str))

    whole = validation_loader(train_config(), tokenizer)
    rows = next(iter(whole))
    assert len(rows) == 10
    truths = [model["ground_truth"] for model in rows.non_tensor_batch["reward_model"]]
    failing = truths[3]

    def run(size):
        loader = validation_loader(train_config({"data.val_batch_size": size}), tokenizer)
        functions = RewardManager(in_driver(reward), tokenizer, FailurePolicy("mask"))
        rewards = RewardPhase(functions, tokenizer, train_config().reward)
        return Validator(phase(), rewards, loader, tokenizer).run(4)

    metrics, samples = run(None)
    assert [sample["gts"] for sample in samples] == truths and {sample["step"] for sample in samples} == {4}
    answers = phase().validate(rows, 4)
    mean_length = answers.tensors["response_mask"].sum(-1).double().mean().item()
    scored = [len(sample["output"]) for sample, truth in zip(samples, truths, strict=True) if truth != failing]
    assert metrics == {
        "val-core/arithmetic/reward/mean@1": pytest.approx(sum(scored) / len(scored)),
        "val-aux/arithmetic/response_length/mean": pytest.approx(mean_length),
        "val-aux/arithmetic/failed_rewards": float(truths.count(failing)),
        "val-aux/arithmetic/num_prompts": 10.0,
        "val-aux/num_prompts": 10.0,
        "val-aux/rollout/replicas_lost": 0.0,
        "val-aux/rollout/runners_lost": 0.0,
        "val-aux/agent/failed": 0.0,
        "val-aux/failed_rewards": float(truths.count(failing)),
    }
    assert [sample["score"] is None for sample in samples] == [truth == failing for truth in truths]
    # Greedy, the result does not depend on the size of a batch, the last and smaller one included.
    assert run(4) == (metrics, samples)
    assert torch.is_tensor(rows.tensors["prompts"])


def test_scores_are_the_same_if_samples_are_scored_while_others_are_generated(phase, train_config, arithmetic, prompts):
    """Two functions; one reads the prompt's facts, one fails for some responses."""
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    functions = {f"{FUNCTIONS}:length_and_index": 1.0, f"{FUNCTIONS}:odd_length": 0.5}
    keys = {"reward.functions": functions, "reward.num_workers": 2}
    manager = function_manager(train_config(keys), tokenizer)
    manager.policy = FailurePolicy("mask")
    with manager:
        rewards = RewardPhase(manager, tokenizer, train_config().reward)
        samples = generate(phase({"n": 3}, keys), prompts, 1)
        outcomes = samples.non_tensor_batch[OUTCOME]
        assert len(outcomes) == 24 and None not in outcomes.tolist()
        early = rewards.score(samples)
        assert manager.scorer.runner.pids == []  # the driver called nothing
        late = rewards.score(generate(phase({"n": 3}), prompts, 1))
        assert manager.scorer.runner.pids != []
    assert torch.equal(early.batch.tensors["token_level_scores"], late.batch.tensors["token_level_scores"])
    assert early.metrics == late.metrics and 0 < early.metrics["reward/failed"] < 24
    assert early.extra_columns.keys() == late.extra_columns.keys()
    assert early.batch.non_tensor_batch.keys() == late.batch.non_tensor_batch.keys()
    for name, column in late.extra_columns.items():
        assert early.extra_columns[name].tolist() == column.tolist(), name


def test_validation_samples_have_the_validation_reward(phase, prompts):
    keys = {
        "reward.functions": {f"{FUNCTIONS}:odd_length": 1.0},
        "reward.validation_function.path": str(FUNCTIONS),
        "reward.validation_function.name": "length_and_index",
        "reward.num_workers": 1,
    }
    scored = phase({"n": 1}, keys)
    (trained, validated) = (generate(scored, prompts, 1), scored.validate(prompts, 1))
    assert {outcome.score for outcome in trained.non_tensor_batch[OUTCOME]} <= {0.0, 1.0}
    assert all("truth" in outcome.extras for outcome in validated.non_tensor_batch[OUTCOME])


def test_retries_of_early_scores_are_counted(
    phase,
    train_config,
    arithmetic,
    prompts,
    tmp_path,
    monkeypatch,
):
    """The process of the first call dies, and another one repeats the call."""
    monkeypatch.setenv(CALLS, str(tmp_path))
    keys = {"reward.functions": {f"{FUNCTIONS}:dies_once": 1.0}, "reward.num_workers": 1}
    samples = generate(phase({"n": 1}, keys), prompts, 1)
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    with function_manager(train_config(keys), tokenizer) as manager:
        metrics = manager.score(samples).metrics
    assert (metrics["reward/failed"], metrics["reward/processes_replaced"]) == (0, 1) and metrics["reward/retries"] >= 1


def test_generation_fails_if_reward_processes_do_not_start(phase, prompts):
    keys = {"reward.functions": {f"{FUNCTIONS}:length_and_index": 1.0}, "reward.num_workers": 1}
    broken = phase({"n": 1}, keys)
    (scorer,) = set(broken.runners._scorers.values())
    scorer.close()
    with raises("reward.processes-ended"):
        generate(broken, prompts, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward.launch_reward_fn_async": False},
        {"reward.num_workers": 0},
        {"reward.functions": {f"{FUNCTIONS}:whole_batch": 1.0}},
    ],
)
def test_the_reward_phase_scores_if_the_runners_cannot(train_config, arithmetic, changes):
    config = train_config(changes)
    assert runner_scorers(config) == {}
    assert function_manager(config, load_tokenizer(str(arithmetic / "model"))).starts_processes


def test_idle_ratios_of_two_sync_intervals():
    """10 s with waits of 1 s and 1.5 s, then 4 s without a wait; the engines work 90 %, then not at all."""
    now = 100.0
    clock = IdleClock(lambda: now)
    assert clock.metrics(0.0) == {}, "before training"

    clock = IdleClock(lambda: now)
    clock.start()
    with clock.waiting():
        now += 1.0
    now += 3.0
    clock.start()  # the next batch of the same interval
    with clock.waiting():
        now += 1.5
    now += 4.5
    metrics = clock.metrics(0.9)
    assert metrics == {
        "fully_async/trainer/idle_ratio": pytest.approx(0.25),
        "fully_async/rollouter/idle_ratio": pytest.approx(0.1),
    }
    now += 4.0
    assert clock.metrics(0.0) == {"fully_async/trainer/idle_ratio": 0.0, "fully_async/rollouter/idle_ratio": 1.0}
