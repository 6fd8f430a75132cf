"""Hosts that are lost at the worst moments of a run, and hosts that are slow."""

from __future__ import annotations

import re

import pytest

# A silent host is found after 6 s; another trial waits for the default of 30 s.
FAST_SSH = ("--ssh", "ssh -o ServerAliveInterval=2 -o ServerAliveCountMax=3")
SPARE = ("--hosts", "h1,h2,h3", *FAST_SSH, "--no-doctor", "--max-restarts", "2", "--restart-delay", "1")
STEPS = 16


@pytest.fixture
def folder(shared, request):
    """The folder of the test's checkpoints."""
    return shared / request.node.name


def newest(folder):
    """Return the step of the newest checkpoint in place."""
    return max(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def steps_of(run, restart):
    """Wait for the first steps of an attempt; return the hosts that it uses, and its first step."""
    start = f"(?s)Restart {restart} of .*?Ray at " if restart else "(?s)Ray at "
    found = run.until(rf"{start}\S+ (h\d) \(\S+\), (h\d) .*?\n(?:\x1b\S*)?step (\d+)/.*?\nstep \d+/")
    return {found[1], found[2]}, int(found[3])


def test_a_host_is_lost_during_a_validation_and_one_during_a_checkpoint(launch, hosts, grpo, task, folder):
    validation = (f"data.val_files={task}/data/test.parquet", "trainer.test_freq=1")
    run = launch(*SPARE, *grpo, *validation, f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=auto")
    assert steps_of(run, 0) == ({"h1", "h2"}, 1)
    hosts.power_off_during("testing", "h1", "h2", lambda: True)
    before = newest(folder)
    assert steps_of(run, 1) == ({"h1", "h3"}, before + 1)

    hosts("mend", "h2")
    hosts("up", "3")
    # One rank has written, the other one has not.
    hosts.power_off_during("save_checkpoint", "h1", "h3", lambda: any(folder.glob(".global_step_*/actor/*.distcp")))
    [unfinished] = folder.glob(".global_step_*.tmp-*")
    before = newest(folder)
    assert unfinished.name.startswith(f".global_step_{before + 1}.")
    assert steps_of(run, 2) == ({"h1", "h2"}, before + 1)
    assert run.code() == 0, run.text()
    assert re.findall(r"node (h\d) is lost", run.text()) == ["h2", "h3"]
    assert sorted(path.name for path in folder.glob("*global_step_*")) == [f"global_step_{STEPS - 1}", f"global_step_{STEPS}"]


def test_the_trainers_host_and_the_engines_host_are_lost_during_a_weight_sync(launch, hosts, grpo, folder):
    run = launch(
        *SPARE,
        *(key for key in grpo if not key.startswith("trainer.nnodes")),
        *("trainer.nnodes=1", "async_training.mode=disaggregated", "async_training.max_staleness=1"),
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=auto"),
        host="h3",
    )
    assert steps_of(run, 0) == ({"h1", "h2"}, 1)
    roles = {host: [p.cmdline()[0] for p in hosts.watched(host)] for host in ("h1", "h2")}
    print(roles)
    hosts.power_off_during("update_weights", "h1", "h2", lambda: True)
    before = newest(folder)
    assert steps_of(run, 1) == ({"h1", "h3"}, before + 1)
    hosts("mend", "h2")
    hosts("up", "3")
    roles = {host: [p.cmdline()[0] for p in hosts.watched(host)] for host in ("h1", "h3")}
    print(roles)

    hosts.power_off_during("update_weights", "h1", "h1", lambda: True)
    before = newest(folder)
    used, first = steps_of(run, 2)
    assert first == before + 1
    assert used == {"h2", "h3"}
    assert run.code() == 0, run.text()
    assert re.findall(r"node (h\d) is lost", run.text()) == ["h2", "h1"]
