"""Jobs whose roles have devices of their own: PPO equals PPO on shared devices, and replicas sync one by one."""

from pathlib import Path

import pytest
import ray
from support.cli_runs import RunFiles, assert_finite, reproducible
from support.documented_metrics import undocumented
from uid_recorder import RECORDER, trained_groups

from megarl.cluster.session import RaySession
from megarl.tracing.trace_file import read_trace

STEPS = 3
APART = ("critic.nnodes=1", "actor_rollout_ref.ref.nnodes=1", "critic.megatron.param_offload=true")
PASSES, UPDATES = ("old_log_prob", "ref", "values"), ("update_critic", "update_actor")


@pytest.fixture(scope="module")
def cluster_of_three(forked_workers):
    """A Ray with three CPU slots on any number of cores, as the environment of the jobs that join it.

    The jobs' workers are forks of the shared server, like those of a job with a Ray of its own.
    """
    with RaySession(num_cpus=3) as session:
        yield {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": session.token_file,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this cluster is on the loopback interface only
        }


@pytest.fixture(scope="module")
def arguments(small, dense_reward):
    return [
        *("--config-name", "quickstart", *small, *dense_reward, f"trainer.total_training_steps={STEPS}"),
        *("trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
        *("critic.megatron.data_parallel_size=1", "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1"),
        *("trainer.critic_warmup=1", "trainer.val_before_train=false", "trainer.test_freq=2", "trainer.save_freq=2"),
        *("trainer.timeline.enable=true", "trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2"),
    ]


@pytest.fixture(scope="module")
def runs(arguments, start, cluster_of_three):
    """Files of a run whose roles share devices, and of one whose roles have their own."""
    runs = {}
    for name, keys, env in (("shared", (), None), ("apart", APART, cluster_of_three)):
        run = start(*arguments, *keys, f"trainer.experiment_name={name}", env=env, warm=True)
        assert run.wait() == 0, run.output
        runs[name] = RunFiles(run.folder, name)
    return runs


def test_roles_on_their_own_devices_train_like_roles_that_share(runs):
    shared, apart = (list(files.steps.values()) for files in runs.values())
    assert [reproducible(row) for row in apart] == [reproducible(row) for row in shared]
    assert len(apart) == STEPS and "actor/grad_norm" in apart[1] and "critic/grad_norm" in apart[0]
    assert undocumented(name for row in apart for name in row) == []

    assert not any(name.startswith("timing_hidden_s/") for row in shared for name in row)
    for step, row in enumerate(apart, 1):
        assert_finite(row)
        # In the critic's warm-up there is no update of the actor beside the critic's.
        for group in (PASSES, UPDATES if step > 1 else ()):
            hidden = {name for name in group if f"timing_hidden_s/{name}" in row}
            assert len(hidden) == max(len(group) - 1, 0), "all but the longest"
        outside = ("step", "testing", "save_checkpoint")
        parts = sum(s for name, s in row.items() if name.startswith("timing_s/") and name[9:] not in outside)
        beside = sum(s for name, s in row.items() if name.startswith("timing_hidden_s/"))
        assert parts - beside <= row["timing_s/step"]

    spans = [event for event in read_trace(runs["apart"].newest) if event.get("cat") == "phase"]
    begin = {name: [e["ts"] for e in spans if e["name"] == name] for name in (*PASSES, *UPDATES)}
    end = {name: [e["ts"] + e["dur"] for e in spans if e["name"] == name] for name in (*PASSES, *UPDATES)}
    assert len(begin["values"]) == STEPS and len(begin["update_actor"]) == STEPS - 1
    assert all(max(begin[name][step] for name in PASSES) < min(end[name][step] for name in PASSES) for step in range(3))


@pytest.mark.release(twin="tests/e2e/test_e2e_ppo.py::test_killed_run_resumes_bit_exact")
def test_a_resumed_run_with_roles_on_their_own_devices_is_equal(arguments, runs, start, cluster_of_three):
    checkpoint = runs["apart"].root / "checkpoints" / "global_step_2"
    again = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    run = start(*arguments, *APART, *again, "trainer.experiment_name=resumed", env=cluster_of_three, warm=True)
    assert run.wait() == 0, run.output
    resumed = RunFiles(run.folder, "resumed").steps
    assert "step 2/3" not in run.output and reproducible(resumed[3]) == reproducible(runs["apart"].steps[3])


@pytest.mark.release(
    twin="tests/sharding/test_sharding_manager.py::test_a_failure_in_the_last_wave_stops_all_replicas_and_the_next_sync_has_one_wave"
)
def test_replicas_sync_one_by_one_and_one_dies_in_its_wave(small, start, cluster_of_three):
    run = start(
        RECORDER,
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=rolling", "sync.verify_freq=1"),
        *("data.max_response_length=40", "actor_rollout_ref.rollout.max_num_seqs=1"),
        f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('slow_engine.py')}",
        *("async_training.max_staleness=2", "async_training.sync_wave_size=1"),
        *("actor_rollout_ref.rollout.n_gpus_per_node=2", "trainer.total_training_steps=4"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "reward.num_workers=0"),
        f"reward.custom_reward_function.path={Path(__file__).with_name('deadly_reward.py')}",
        "reward.custom_reward_function.name=length_and_kill",
        env=cluster_of_three,
        warm=True,
    )
    assert run.wait() == 0, run.output
    # The second sync of the run is the first in waves; the one after the replacement is for all again.
    assert run.output.count("rollout replica 0 is lost and is replaced: weight sync to version 3 failed") == 1
    files = RunFiles(run.folder, "rolling")
    steps = list(files.steps.values())
    assert undocumented(name for row in files.metrics for name in row) == []
    interrupted = [row["rollout_service/interrupted"] for row in steps]
    assert interrupted[0] > 0 == interrupted[3], "the last sync has none"
    assert all(row["weight_sync/verified"] == 1 for row in steps)
    assert all(0 < row["weight_sync/pause_s"] <= row["weight_sync/seconds"] for row in steps[:2])
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 2 for row in steps)
    trained = trained_groups(files.newest, 24)
    assert sorted(trained) == list(range(4 * 24))
