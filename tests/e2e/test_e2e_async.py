"""Asynchronous training from the command line: bound of staleness, resume, partial rollouts and their experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from route_recorder import assert_first_experts
from support.cli_runs import RunFiles, assert_finite, reproducible
from support.documented_metrics import undocumented
from uid_recorder import RECORDER, trained_groups

STEPS, PROMPTS = 4, 24


def test_a_resumed_run_trains_the_prompts_in_flight(small, dense_reward, start):
    arguments = [
        *("--config-name", "quickstart_async", *small, *dense_reward, "trainer.experiment_name=async"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", "trainer.save_freq=2"),
        *("trainer.max_actor_ckpt_to_keep=null", "async_training.partial_rollout=false", RECORDER),
    ]
    run = start(*arguments)
    assert run.wait() == 0, run.output
    first = RunFiles(run.folder, "async")
    trained = trained_groups(first.newest, PROMPTS)
    assert sorted(trained) == list(range(STEPS * PROMPTS)) and trained != sorted(trained)
    assert list(first.steps) == list(range(1, STEPS + 1))
    assert undocumented(name for row in first.metrics for name in row) == []
    for step, row in first.steps.items():
        assert_finite(row)
        assert row["training/off_policy/trajectory_staleness_worst"] <= 1
        assert row["fully_async/count/current_param_version"] == step
        assert 0 <= row["fully_async/trainer/idle_ratio"] < 1
        idle = row["fully_async/rollouter/idle_ratio"]
        assert 0 <= idle < 1 if step < STEPS else idle == 1, "the last step has nothing to generate"
    # One step off: the samples of the second step were generated while the first one trained.
    assert first.steps[2]["training/off_policy/admission_staleness"] > 0
    validated = {step: row.get("val-aux/step") for step, row in first.steps.items() if held_out(row)}
    assert validated == {3: 2, 4: None}, "the second step is validated beside the third"
    assert first.steps[3]["rollout_service/validation_wait_s"] > 0
    ledger = ledger_of(run.folder, "async", 2)
    assert ledger["trained"] == 2 * PROMPTS and ledger["admitted"] == len(ledger["groups"]) + 2 * PROMPTS == STEPS * 24
    run = start(*arguments, *resume_from(run.folder, "async", 2))
    assert run.wait() == 0, run.output
    again = RunFiles(run.folder, "async")
    assert sorted(trained[: 2 * PROMPTS] + trained_groups(again.newest, PROMPTS)) == list(range(STEPS * PROMPTS))
    assert list(again.steps) == list(first.steps)
    assert again.steps[3]["val-aux/step"] == 2 and held_out(again.steps[3]) == held_out(first.steps[3])
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 1 for row in again.steps.values())
    ledger = ledger_of(run.folder, "async", STEPS)
    assert ledger["trained"] == ledger["admitted"] == STEPS * PROMPTS and ledger["groups"] == []


def held_out(row):
    return {name: value for name, value in row.items() if name.startswith("val-core")}


def ledger_of(folder, name, step):
    file = folder / "outputs" / name / "checkpoints" / f"global_step_{step}" / "trainer_state.json"
    ledger: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["rollout"]["ledger"]
    return ledger


def resume_from(folder, name, step):
    checkpoint = folder / "outputs" / name / "checkpoints" / f"global_step_{step}"
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"


@pytest.fixture(scope="module")
def partial(small, mixture, start):
    """A model with experts, whose routes come from the engine (R3); its only replica dies within the second sync."""
    run = start(
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=partial"),
        *(f"actor_rollout_ref.model.path={mixture}", "actor_rollout_ref.actor.router_replay.mode=R3"),
        f"trainer.callbacks=[{Path(__file__).with_name('route_recorder.py')}:RouteRecorder]",
        *("data.max_response_length=40", "actor_rollout_ref.rollout.max_num_seqs=4", "sync.verify_freq=1"),
        *("async_training.max_staleness=2", "actor_rollout_ref.actor.optim.lr=2e-2"),
        # Responses are in flight at each sync, however slow the trainer is on a loaded machine.
        f"actor_rollout_ref.model.external_lib=[{Path(__file__).with_name('slow_engine.py')}]",
        *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false", "trainer.test_freq=-1"),
        *(f"reward.custom_reward_function.path={Path(__file__).with_name('deadly_reward.py')}", "reward.num_workers=0"),
        "reward.custom_reward_function.name=length_and_kill",
    )
    assert run.wait() == 0, run.output
    assert run.output.count("rollout replica 0 is lost and is replaced: weight sync to version 3 failed") == 1
    return RunFiles(run.folder, "partial")


def test_weight_syncs_interrupt_responses_and_survive_a_lost_replica(partial):
    files = partial
    steps = list(files.steps.values())
    assert undocumented(name for row in files.metrics for name in row) == []
    interrupted = [row["rollout_service/interrupted"] for row in steps]
    assert sum(interrupted) > 0 == interrupted[1] == interrupted[3], "the lost replica had all; the last sync has none"
    assert all(row["rollout_service/sync_wait_s"] < 0.5 for row in steps), "no sync waits for responses"
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 2 for row in steps)
    continued = [row["fully_async/partial/total_partial_num"] for row in steps]
    assert continued[0] == 0 < sum(continued)


def test_tokens_keep_the_experts_with_which_they_were_generated(partial, mixture):
    """Also tokens before an interruption, whose context the engine computes again with newer weights."""
    rows = [row for step in partial.steps for row in torch.load(partial.newest / f"routes-{step}.pt")]
    assert len(rows) == STEPS * PROMPTS * 2
    counts = assert_first_experts(rows, mixture)
    assert counts.unchanged > 0 and counts.interrupted > 0
    assert counts.changed > 0, "newer weights route some tokens to other experts"


def test_a_run_without_replicas_saves_whole_steps_and_names_a_step_that_trained_in_part(small, start):
    """The replica dies while conversations are in flight: before a sync, then between two mini-batches of a step."""
    arguments = [
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=lost", "trainer.save_freq=1000"),
        *("data.max_response_length=60", "actor_rollout_ref.rollout.max_num_seqs=2"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "async_training.partial_rollout=false"),
        *(f"reward.custom_reward_function.path={Path(__file__).with_name('deadly_reward.py')}", "reward.num_workers=0"),
        "reward.custom_reward_function.name=length_and_kill_at_once",
    ]
    run = start(*arguments, "async_training.sync_interval=1", "actor_rollout_ref.actor.ppo_mini_batch_size=24")
    assert run.wait() == 1, run.output
    assert "the only replica is lost" in run.output and "The run ends after step 1; saved in" in run.output
    first = run.folder / "outputs" / "lost" / "checkpoints" / "global_step_1"
    ledger = json.loads((first / "trainer_state.json").read_text(encoding="utf-8"))["rollout"]["ledger"]
    assert ledger["trained"] == PROMPTS and len(ledger["groups"]) == PROMPTS, "the next step's groups are in flight"

    run = start(*arguments, "trainer.resume_mode=auto", folder=run.folder)
    assert run.wait() == 1, run.output
    assert "the only replica is lost" in run.output
    assert "Step 2 has trained in part and is not saved; resume from" in run.output
    assert [path.name for path in first.parent.glob("global_step_*")] == [first.name]


@pytest.fixture(scope="module")
def colocated(small, dense_reward, start):
    """Arguments and files of a colocated run."""
    arguments = [
        *("--config-name", "quickstart_grpo", *small, *dense_reward, "trainer.experiment_name=colocated"),
        # Responses are in flight when a batch is complete, however late the driver learns of it on a loaded machine.
        f"actor_rollout_ref.model.external_lib=[{Path(__file__).with_name('slow_engine.py')}]",
        *("async_training.mode=colocated", "async_training.max_staleness=1", "sync.verify_freq=1"),
        *("algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.max_num_seqs=4"),
        *("data.max_response_length=40", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"),
        *("trainer.val_before_train=false", "trainer.test_freq=2", "trainer.max_actor_ckpt_to_keep=null"),
    ]
    run = start(*arguments)
    assert run.wait() == 0, run.output
    return arguments, RunFiles(run.folder, "colocated")


def test_colocated_training_begins_when_a_batch_is_complete(colocated):
    """Responses pause and continue."""
    steps = list(colocated[1].steps.values())
    interrupted = [row["rollout_service/interrupted"] for row in steps]
    assert sum(interrupted) > 0 == interrupted[3]
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 1 for row in steps)
    assert sum(row["fully_async/partial/total_partial_num"] for row in steps) > 0
    assert all(row["weight_sync/verified"] == 1 for row in steps)


@pytest.mark.release(twin="tests/e2e/test_e2e_async.py::test_a_resumed_run_trains_the_prompts_in_flight")
def test_a_resumed_colocated_run_trains_the_prompts_in_flight(colocated, start):
    arguments, files = colocated
    run = start(*arguments, *resume_from(files.folder, "colocated", 2))
    assert run.wait() == 0, run.output
    again = RunFiles(run.folder, "colocated")
    assert list(again.steps) == list(files.steps) and all(
        row["weight_sync/verified"] == 1 for row in again.steps.values()
    )
    ledger = ledger_of(run.folder, "colocated", STEPS)
    assert ledger["trained"] == ledger["admitted"] == STEPS * PROMPTS and ledger["groups"] == []


def exact_metrics(start, arguments, name):
    run = start(*arguments, f"trainer.experiment_name={name}")
    assert run.wait() == 0, run.output
    return [reproducible(row) for row in RunFiles(run.folder, name).steps.values()]


ROUNDED = ("rollout_corr/", "training/rollout_")
"""Metrics of the engine's log-probs, whose rounding depends on the sequences that are decoded at the same time."""
DAPO = ("+experiment=dapo", "actor_rollout_ref.rollout.n=2", "reward.custom_reward_function.name=dense_or_constant")
SAME_SAMPLES = pytest.mark.release(
    twin="tests/samples/test_samples_service.py::test_staleness_0_gives_the_samples_of_synchronous_training"
)


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        pytest.param((), "colocated", marks=SAME_SAMPLES),
        pytest.param(DAPO, "colocated", marks=SAME_SAMPLES),
        (DAPO, "disaggregated"),
    ],
    ids=["colocated", "dapo-colocated", "dapo-disaggregated"],
)
def test_staleness_0_is_synchronous_training(small, dense_reward, start, keys, mode):
    """Every metric of training is equal bit for bit; the asynchronous modes add metrics of their own."""
    arguments = [
        *("--config-name", "quickstart_grpo", *small, *dense_reward, "trainer.total_training_steps=3"),
        *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"),
        *("actor_rollout_ref.rollout.replicas=1", "trainer.val_before_train=false", "trainer.test_freq=2"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=24",
    ]
    devices = {
        "colocated": (),
        "disaggregated": ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
    }
    shared = [*arguments, *keys]
    expected = exact_metrics(start, [*shared, "async_training.mode=sync"], "exact-sync")
    assert len(expected) == 3 and "actor/grad_norm" in expected[0]
    found = exact_metrics(start, [*shared, *devices[mode], f"async_training.mode={mode}"], f"exact-{mode}")
    for row, first in zip(found, expected, strict=True):
        rounded = {name: value for name, value in first.items() if name.startswith(ROUNDED)}
        others = {name: value for name, value in first.items() if name not in rounded}
        assert {name: row.get(name) for name in others} == others
        assert {name: row[name] for name in rounded} == pytest.approx(rounded, rel=1e-5, abs=1e-6)
    if keys:
        assert sum(row["filter_groups/dropped"] for row in expected) > 0
