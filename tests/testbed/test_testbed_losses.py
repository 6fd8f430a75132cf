"""Hosts that are lost at the worst moments of a run, and hosts that are slow."""

from __future__ import annotations

import re
import time

import pytest

from megarl.ops.report.findings import run_findings
from megarl.ops.report.run_files import find_runs, read_run
from megarl.tracing.trace_file import read_trace

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
    hosts.power_off_during("testing", "h1", "h2")
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
    assert sorted(path.name for path in folder.glob("*global_step_*")) == [
        f"global_step_{STEPS - 1}",
        f"global_step_{STEPS}",
    ]


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
    hosts.power_off_during("update_weights", "h1", "h2", silent=False)
    before = newest(folder)
    assert steps_of(run, 1) == ({"h1", "h3"}, before + 1)
    hosts("up", "3")
    hosts.power_off_during("update_weights", "h1", "h1")
    before = newest(folder)
    used, first = steps_of(run, 2)
    assert first == before + 1
    assert used == {"h2", "h3"}
    assert run.code() == 0, run.text()
    assert re.findall(r"node (h\d) is lost", run.text()) == ["h2", "h1"]


def test_a_short_cut_is_survived_and_a_lost_host_without_a_spare_ends_the_run(launch, hosts, grpo):
    ssh = ("--ssh", "ssh -o ServerAliveInterval=4 -o ServerAliveCountMax=4")
    run = launch("--hosts", "h1,h2", *ssh, "--no-doctor", *grpo, "trainer.total_training_steps=1000")
    run.until(r"(?m)^step 1/")
    hosts("cut", "h2")
    time.sleep(8)
    steps = len(re.findall(r"(?m)^step \d+/", run.text()))
    hosts("mend", "h2")
    run.until(rf"(?m)^step {steps + 2}/")
    hosts("cut", "h2")
    hosts("off", "h2")
    assert run.code() == 1
    assert re.findall(r"node (h\d) is lost", run.text()) == ["h2"], run.text()


def test_a_host_with_a_tenth_of_the_cpu_is_named_with_its_cost(launch, hosts, grpo, folder, shared):
    """After the first steps; the watchdog and a warning name the host during the run, the report afterwards."""
    run = launch(
        *("--hosts", "h1,h2", "--no-doctor", *grpo),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",  # a data-parallel rank on each host
        # Until the watchdog has the slow host's stacks, the update goes on.
        *("actor_rollout_ref.actor.ppo_epochs=30", "+trainer.watchdog.phases.update_actor=2"),
        *("trainer.total_training_steps=4", "trainer.save_freq=-1"),
    )
    run.until(r"(?m)^step 1/")
    hosts("slow", "h2", "10")
    assert run.code() == 0, run.text()
    assert re.search(r"actor rank \d on 10\.77\.0\.12 is in update_actor", run.text()), run.text()
    assert re.search(r"step [34]: 10\.77\.0\.12 is slow", run.text()), run.text()
    [output] = find_runs([shared / "outputs" / folder.name.removeprefix("test_")[:40]])
    assert any("10.77.0.12 is slow" in finding.text for finding in run_findings(read_run(output)))


def test_a_host_whose_clock_is_an_hour_ahead(launch, hosts, grpo, folder, shared):
    """The doctor refuses it. Without the doctor the run trains, and its timeline is on one clock."""
    hosts("clock", "h2", "3600")
    job = ("--hosts", "h1,h2", *grpo, "trainer.total_training_steps=3")
    refused = launch(*job)
    assert refused.code() == 1
    assert re.search(r"h2 is ahead of \S+ by 3[56]\d\d\.\d s", refused.text()), refused.text()

    run = launch("--no-doctor", *job, "trainer.timeline.enable=true")
    assert run.code() == 0, run.text()
    hosts("clock", "h2")
    assert newest(folder) == 3 and len([*folder.glob("*global_step_*")]) == 2
    [output] = find_runs([shared / "outputs" / folder.name.removeprefix("test_")[:40]])
    events = read_trace(output / "timeline" / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    updates = [event for event in events if event["name"] == "update_actor" and event["ph"] == "X"]
    phases = [event for event in updates if names[event["pid"]] == "driver"]
    verbs = [event for event in updates if names[event["pid"]] == "actor rank 1"]
    assert len(phases) == len(verbs) == 3
    for phase, verb in zip(phases, verbs, strict=True):  # the monotonic clocks are 1000 s apart
        assert phase["ts"] - 1e6 < verb["ts"] < verb["ts"] + verb["dur"] < phase["ts"] + phase["dur"] + 1e6
