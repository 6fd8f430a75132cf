"""Replicas of a disaggregated job that come and go: with their node, on request, and with the trainer's devices."""

from __future__ import annotations

import json
import signal

import pytest
from support.cli_runs import START_S, RunFiles
from support.documented_metrics import undocumented
from support.ray_nodes import TwoNodes
from uid_recorder import RECORDER, trained_groups

from megarl.base.packages import is_installed
from megarl.ops import scale

SGLANG = pytest.param(
    "sglang",
    marks=[
        pytest.mark.sglang,
        pytest.mark.release(
            twin="tests/e2e/test_e2e_elastic.py::test_replicas_leave_and_join_with_their_node_and_on_request"
        ),
    ],
)


@pytest.fixture
def two_nodes(shared_server):
    """The trainer and a replica on the first node, the other replica on the second."""
    with TwoNodes(2, shared_server) as nodes:
        yield nodes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["embedded", *([SGLANG] if is_installed("sglang") else [])])
def test_replicas_leave_and_join_with_their_node_and_on_request(engine, small, two_nodes, start, capsys):
    """The node of replica 1 dies and comes back; then the user takes a replica away and gives it back."""
    run = start(
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=elastic", "sync.verify_freq=1"),
        *("actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
        *("actor_rollout_ref.rollout.min_replicas=1", "trainer.total_training_steps=2000", "trainer.save_freq=-1"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "reward.num_workers=0"),
        *(f"actor_rollout_ref.rollout.name={engine}", RECORDER),
        env=two_nodes.environment,
        warm=True,
    )
    steps: list[dict[str, float]] = []

    def wait_for(replicas):
        """Wait until a later weight sync has reached this number of replicas."""
        seen = len(steps)

        def reached():
            for file in run.folder.glob("outputs/elastic/*/metrics.jsonl"):
                complete = file.read_text(encoding="utf-8").rpartition("\n")[0]  # the run may write the last line now
                steps[:] = [row for line in complete.splitlines() if (row := json.loads(line))["step"] > 0]
            return any(row["rollout_service/replicas"] == replicas for row in steps[seen:])

        run.wait_until(reached, 2 * START_S)

    wait_for(2)
    two_nodes.send("remove")
    wait_for(1)
    two_nodes.send("add")
    wait_for(2)
    folder = RunFiles(run.folder, "elastic").newest
    assert scale.main([str(folder), "3"]) == 2
    error = capsys.readouterr().err
    assert "[rollout.replica-count]" in error and "1 (rollout.min_replicas) to 2 (rollout.replicas)" in error
    assert scale.main([str(folder), "1"]) == 0
    wait_for(1)
    assert scale.main([str(folder), "2"]) == 0
    wait_for(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.output  # a run without checkpoints ends at once
    assert scale.main([str(folder), "1"]) == 2 and "[rollout.run-ended]" in capsys.readouterr().err
    assert "leaves the run until it can join again" in run.output
    assert run.output.count("has joined; 2 replicas of 2") == 2 and "has left; 1 replica of 2" in run.output
    assert all(row["weight_sync/verified"] == 1 for row in steps)
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 1 for row in steps)
    trained = trained_groups(folder, 24)
    assert len(trained) == len(set(trained)), "no prompt is trained twice"
    admitted_last = 2 * 24  # (max_staleness + 1) batches are in flight at the end
    assert set(trained) >= set(range(len(trained) - admitted_last)), "no prompt is lost"


def test_the_trainers_devices_generate_while_it_waits(small, start):
    """The second replica is on the trainer's device; its requests move to the first one before each update."""
    run = start(
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=hybrid", "sync.verify_freq=1"),
        *("async_training.hybrid_rollout=true", "async_training.max_staleness=1", "trainer.total_training_steps=4"),
        *("data.max_response_length=64", "actor_rollout_ref.rollout.max_num_seqs=2", "trainer.test_freq=2"),
        *("trainer.val_before_train=true", RECORDER),
    )
    assert run.wait() == 0, run.output
    files = RunFiles(run.folder, "hybrid")
    steps = list(files.steps.values())
    assert undocumented(name for row in files.metrics for name in row) == []
    assert "rollout-1.log" in {path.name for path in (files.newest / "logs").iterdir()}
    assert steps[0]["rollout_service/replicas"] == 2 and steps[0]["rollout_service/switch_s"] > 0
    assert all(row["rollout_service/replicas"] in (1, 2) and row["weight_sync/verified"] == 1 for row in steps)
    assert all(row["rollout/replicas_lost"] == 0 for row in steps)
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 1 for row in steps)
    trained = trained_groups(files.newest, 24)
    assert sorted(trained) == list(range(4 * 24)), "no prompt is lost or trained twice"
