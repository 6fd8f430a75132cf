"""Failing and interrupted runs end at once, name the cause and leave no process."""

import functools
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from reward_functions import PAUSE_AT, PAUSED
from support.cli_runs import REWARDS, ROOT, RunFiles, assert_says_how_it_ended

from megarl.cluster.fork_server import ENVIRONMENT
from megarl.tracing.stacks import STOPPED, process_state
from megarl.trainer.state.checkpoint_store import CheckpointStore
from megarl.trainer.state.stopping import KILLED

# Long enough for a slow machine, and shorter than every timeout of a minute or more.
AT_ONCE_S = 50.0
WORKER = "WorkerProcess"  # and ServingWorkerProcess
SAMPLES = 48  # of a step
DYING_WRITER = Path(__file__).with_name("dying_writer")


@pytest.fixture
def start_alone(start):
    """Runs with a fork server of their own, which must end with them."""
    return functools.partial(start, env={ENVIRONMENT: "1"}, warm=True)


@pytest.fixture
def endless(small):
    """GRPO for minutes with the fewest workers: an actor of two ranks and two engines."""
    return [
        *("--config-name", "quickstart_grpo", *small, "trainer.experiment_name=endless"),
        *("actor_rollout_ref.actor.use_kl_loss=false", "trainer.total_training_steps=5000"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
    ]


@pytest.fixture
def one_device():
    return ["trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"]


def assert_ends(run, code):
    """Check that the run ends soon with an exit code and leaves no process; return its output."""
    begin = time.monotonic()
    assert run.wait(AT_ONCE_S) == code, run.output
    assert run.remaining(AT_ONCE_S - (time.monotonic() - begin)) == []
    return run.output


def in_third_step(run):
    return "step 2/" in run.output


def pid_of_actor(run):
    """Process ID of the actor's rank 0."""
    (log,) = (RunFiles(run.folder, "endless").newest / "logs").glob("actor*0.log")
    return int(re.findall(r"begins, pid (\d+)", log.read_text(encoding="utf-8"))[-1])


@pytest.mark.release(twin="tests/e2e/test_e2e_failures.py::test_ctrl_c_saves_and_names_the_command_that_continues")
def test_ctrl_c_ends_a_run_and_all_its_processes(endless, start):
    """The run is as from a shell: its driver is no fork either."""
    run = start(*endless, env={ENVIRONMENT: "1"})
    run.wait_until(lambda: in_third_step(run))
    run.signal_group(signal.SIGINT)
    output = assert_ends(run, 130)
    assert output.splitlines()[-1] == "interrupted" and "Traceback" not in output
    assert re.search(r"Ended in step \d+ of 5000 \(Ctrl-C\), not saved: trainer.save_freq=-1. To start again:", output)
    files = RunFiles(run.folder, "endless")
    assert files.summary["stopped"] == "Ctrl-C" and files.summary["steps"] >= 2
    assert "endless: ended early (Ctrl-C)" in output and (files.newest / "report.html").is_file()


def test_ctrl_c_saves_and_names_the_command_that_continues(endless, one_device, start):
    run = start(*endless, *one_device, "trainer.save_freq=1000", "trainer.hf_export_dir=export")
    run.wait_until(lambda: in_third_step(run))
    run.signal_group(signal.SIGINT)
    output = assert_ends(run, 130)
    assert output.splitlines()[-1] == "interrupted" and "Traceback" not in output
    assert "Ctrl-C: the run ends after the current step and saves" in output
    files = RunFiles(run.folder, "endless")
    (step,) = CheckpointStore(files.root / "checkpoints").steps()
    assert max(files.steps) == step >= 2 and files.summary["stopped"] == "Ctrl-C"
    assert (files.newest / "report.html").is_file() and not (run.folder / "export").exists()
    saved = re.search(rf"saved in \S*/global_step_{step}\. To go on:\n  (python\S* .*)\nor from elsewhere", output)
    assert saved, output
    words = shlex.split(saved[1])
    assert words[1:4] == ["-m", "megarl", "train"] and words[-1] == "trainer.resume_mode=auto"
    # The printed command, one step longer.
    again = start(*words[4:], f"trainer.total_training_steps={step + 1}", folder=run.folder)
    assert again.wait() == 0, again.output
    assert sorted(RunFiles(run.folder, "endless").steps) == [*range(1, step + 2)]
    assert (run.folder / "export" / "run_id").is_file()


def test_a_second_ctrl_c_ends_at_once_without_a_save(endless, one_device, dense_reward, start, tmp_path):
    paused = tmp_path / "paused"  # in the middle of the first step
    env = {PAUSE_AT: "5", PAUSED: str(paused)}
    run = start(*endless, *one_device, *dense_reward, "trainer.save_freq=1000", env=env, warm=True)
    run.wait_until(paused.exists)
    run.signal_group(signal.SIGINT)
    run.wait_until(lambda: "Ctrl-C: the run ends after the current step" in run.output)
    run.signal_group(signal.SIGINT)
    output = assert_ends(run, 130)
    assert output.splitlines()[-1] == "interrupted" and "Traceback" not in output
    assert not CheckpointStore(run.folder / "outputs" / "endless" / "checkpoints").steps()


@pytest.mark.release(twin="tests/trainer/test_trainer_checkpoint_store.py::test_killed_at_every_change_to_the_disk")
def test_a_second_sigterm_in_the_final_save_leaves_the_checkpoints_whole(
    endless,
    one_device,
    dense_reward,
    start_alone,
    tmp_path,
):
    """The first signal comes in the middle of the second step; the actor stands still in the save after it."""
    paused, hangs = tmp_path / "paused", tmp_path / "hangs"
    env = {PAUSE_AT: str(SAMPLES + 5), PAUSED: str(paused), "PYTHONPATH": f"{DYING_WRITER}:{ROOT}"}
    env |= {"MEGARL_E2E_HANG_WRITING": r"global_step_2\b.*/actor/.*\.distcp$", "MEGARL_E2E_HANGS": str(hangs)}
    run = start_alone(*endless, *one_device, *dense_reward, "trainer.save_freq=1", env=env | {ENVIRONMENT: "1"})
    run.wait_until(paused.exists)
    run.process.send_signal(signal.SIGTERM)
    run.wait_until(lambda: "SIGTERM: the run ends after the current step and saves" in run.output)
    paused.unlink()
    run.wait_until(hangs.exists)
    run.process.send_signal(signal.SIGTERM)
    output = assert_ends(run, 128 + signal.SIGTERM)
    assert "Traceback" not in output
    store = CheckpointStore(run.folder / "outputs" / "endless" / "checkpoints")
    assert store.steps() == [1] and store.resolve("auto", None, ("actor",)) == store.root / "global_step_1"
    store.verify(store.root / "global_step_1", ("actor",))


@pytest.mark.release(
    twin="tests/cluster/test_cluster_session.py::test_signal_to_the_group_while_ray_starts_ends_soon_and_in_order"
)
def test_ctrl_c_during_worker_start_ends_all_processes(endless, start_alone):
    run = start_alone(*endless)
    run.wait_until(lambda: bool(run.running(WORKER)))
    run.signal_group(signal.SIGINT)
    output = assert_ends(run, 130)
    assert output.splitlines()[-1] == "interrupted" and "Traceback" not in output


def test_killed_actor_ends_the_run_and_is_named(endless, start):
    run = start(*endless)
    run.wait_until(lambda: in_third_step(run))
    victim = pid_of_actor(run)
    os.kill(victim, signal.SIGKILL)
    output = assert_ends(run, 1)
    assert re.search(rf"actor rank 0 \(pid {victim} on [\d.]+\) died in (\w+)", output), output
    assert "its process was killed" in output and "Traceback (most recent call last)" not in output


def test_a_killed_raylet_leaves_one_sentence_a_summary_and_the_last_checkpoint(endless, one_device, start):
    """Ray ends a driver whose raylet is gone within one of its calls: often before the driver has seen it."""
    run = start(*endless, *one_device, "trainer.save_freq=1")
    run.wait_until(lambda: in_third_step(run))
    (process,) = run.running("raylet/raylet")
    process.kill()
    assert_says_how_it_ended(assert_ends(run, 1), RunFiles(run.folder, "endless"))


@pytest.mark.release(
    twin="tests/cluster/test_cluster_session.py::test_death_of_a_process_of_ray_is_one_sentence_and_no_failure_of_finished_work"
)
def test_a_killed_process_of_ray_before_the_first_step_leaves_a_sentence(endless, one_device, start):
    run = start(*endless, *one_device)
    run.wait_until(lambda: "start workers ..." in run.output)
    (process,) = run.running("raylet/raylet")
    process.kill()
    output = assert_ends(run, 1)
    assert output.count("died, so the run ends") + output.count(f"Ended before the first step ({KILLED})") == 1, output
    assert "Traceback (most recent call last)" not in output


@pytest.mark.release(twin="tests/trainer/test_trainer_watchdog.py::test_the_stalled_rank_is_named_and_the_run_ends")
def test_watchdog_names_a_stopped_process_and_ends_the_run_with_valid_checkpoints(
    endless, dense_reward, start, tmp_path
):
    """The process is stopped in the middle of the third step, before the next call of the actor."""
    paused = tmp_path / "paused"
    env = {PAUSE_AT: str(2 * SAMPLES + 5), PAUSED: str(paused)}
    limits = ["+trainer.watchdog.phases.start_workers=null", "trainer.watchdog.timeout_s=12"]
    limits += ["trainer.nccl_timeout=72", "actor_rollout_ref.rollout.health.timeout_s=9", "sync.timeout_s=20"]
    keys = ("trainer.save_freq=1", *limits, "trainer.watchdog.action=end")
    run = start(*endless, *dense_reward, *keys, env=env, warm=True)
    run.wait_until(paused.exists)
    victim = pid_of_actor(run)  # a frozen replica is replaced
    os.kill(victim, signal.SIGSTOP)
    run.wait_until(lambda: process_state(victim) == STOPPED)
    paused.unlink()
    assert run.wait() == 1, run.output
    assert run.remaining(AT_ONCE_S) == []
    assert re.search(rf"actor rank 0 \(pid {victim} on [\d.]+\) is stopped", run.output), run.output
    assert "Traceback" not in run.output
    files = RunFiles(run.folder, "endless")
    (stall,) = (files.newest / "stalls").iterdir()
    assert {"summary.txt", "driver-0.txt", "actor-0.txt", "actor-1.txt"} <= {file.name for file in stall.iterdir()}
    store = CheckpointStore(files.root / "checkpoints")
    assert store.steps()
    for step in store.steps():
        store.verify(store.root / f"global_step_{step}", ("actor",))


def test_dead_replicas_are_replaced_and_the_run_is_saved_if_all_die(endless, start_alone):
    deadly = f"reward.custom_reward_function.path={Path(__file__).with_name('deadly_reward.py')}"
    run = start_alone(
        *endless, deadly, "reward.custom_reward_function.name=score", "reward.num_workers=0", "trainer.save_freq=1000"
    )
    assert run.wait() == 1, run.output
    assert run.remaining(AT_ONCE_S) == []
    steps = RunFiles(run.folder, "endless").steps
    assert sorted(steps) == [1, 2, 3, 4], run.output
    assert [steps[step]["rollout/replicas_lost"] for step in steps] == [0, 1, 0, 0]
    assert steps[2]["rollout/requests_moved"] > 0
    assert run.output.count("is lost") == 4, run.output
    within_bucket = "rollout replica 0 is lost and is replaced: weight sync to version 3 failed at bucket 1 of 1"
    assert within_bucket in run.output
    assert "all 2 rollout replicas are lost" in run.output and "The run ends after step 4; saved in" in run.output
    assert "global_step_4; resume from there" in run.output


def test_exception_in_a_worker_ends_the_run(endless, one_device, dense_reward, start):
    # The first optimizer step makes the weights huge; the gradient of the next one is not finite.
    run = start(
        *(*endless, *one_device, *dense_reward, "actor_rollout_ref.actor.optim.lr=1e30"),
        *("actor_rollout_ref.actor.optim.max_skipped_steps=0", "sync.transport=inline"),
    )
    assert run.wait() == 1, run.output
    assert run.remaining() == []
    assert "actor rank 0 failed in update_actor: SkippedStepsError" in run.output
    assert "max_skipped_steps=0" in run.output and "--- traceback of actor rank 0 ---" in run.output


def test_exception_in_the_reward_function_ends_the_run_and_shows_the_sample(endless, one_device, start):
    run = start(
        *(
            *endless,
            *one_device,
            f"reward.custom_reward_function.path={REWARDS}",
            "reward.custom_reward_function.name=broken",
        )
    )
    assert run.wait() == 1, run.output
    assert run.remaining() == []
    output = run.output
    assert "ZeroDivisionError: a mistake in the reward" in output and str(REWARDS) in output
    assert "What is " in output and "ground_truth" in output and "reward.on_error=mask" in output
    assert "[reward.row-failed]" in output
    assert "Traceback" not in output


def test_more_devices_than_the_machine_has_are_refused(small, start):
    run = start(
        *("--config-name", "quickstart", *small, "trainer.n_gpus_per_node=1000"),
        *("actor_rollout_ref.actor.megatron.data_parallel_size=1", "critic.megatron.data_parallel_size=1"),
        "actor_rollout_ref.rollout.replicas=1",
    )
    assert run.wait() == 2, run.output
    assert run.remaining() == []
    assert "trainer.nnodes=1, trainer.n_gpus_per_node=1000, trainer.device=cpu: this machine has" in run.output
    assert "[ray.too-few-cores]" in run.output
    assert "Traceback" not in run.output
