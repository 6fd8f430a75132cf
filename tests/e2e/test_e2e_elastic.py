"""Replicas of a disaggregated job that come and go: with their node, on request, and with the trainer's devices."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from cli_runs import CliRun, RunFiles, read_jsonl
from documented_metrics import undocumented

from megarl.ops import scale

NODES = """
import sys
from ray.cluster_utils import Cluster
memory = {"object_store_memory": 80 * 2**20}
head = {"num_cpus": 2, "include_dashboard": False, "_system_config": {"health_check_period_ms": 1000}, **memory}
cluster = Cluster(initialize_head=True, head_node_args=head)
node = cluster.add_node(num_cpus=1, **memory)
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "remove":
        cluster.remove_node(node, allow_graceful=False)
    else:
        node = cluster.add_node(num_cpus=1, **memory)
    print("done", flush=True)
cluster.shutdown()
"""


class TwoNodes:
    """Two Ray nodes on this machine, in a process of their own: Ray may end the process of a cluster that is lost."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-c", NODES], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.address = self._answer("address").split()[1]

    def send(self, change: str) -> None:
        """Remove the second node, or add it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{change}\n")
        self._process.stdin.flush()
        self._answer("done")

    def close(self) -> None:
        """End all nodes."""
        self._process.communicate(timeout=60)

    def _answer(self, start: str) -> str:
        """Return the next line with this start; Ray prints others."""
        assert self._process.stdout is not None
        return next(line for line in self._process.stdout if line.startswith(start))


def test_replicas_leave_and_join_with_their_node_and_on_request(
    small: list[str], start: Callable[..., CliRun], capsys: pytest.CaptureFixture[str]
) -> None:
    """The node of replica 1 dies and comes back; then the user takes a replica away and gives it back."""
    cluster = TwoNodes()
    run = start(
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=elastic", "sync.verify_freq=1"),
        *("actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
        *("actor_rollout_ref.rollout.min_replicas=1", "trainer.total_training_steps=2000", "trainer.save_freq=-1"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "reward_model.num_workers=0"),
        env={"RAY_ADDRESS": cluster.address},
    )
    steps: list[dict[str, float]] = []

    def wait_for(replicas: int) -> None:
        """Wait until a later weight sync has reached this number of replicas."""
        seen = len(steps)

        def reached() -> bool:
            for file in run.folder.glob("outputs/elastic/*/metrics.jsonl"):
                complete = file.read_text().rpartition("\n")[0]  # the run may write the last line now
                steps[:] = [row for line in complete.splitlines() if (row := json.loads(line))["step"] > 0]
            return any(row["rollout_service/replicas"] == replicas for row in steps[seen:])

        run.wait_until(reached)

    try:
        wait_for(2)
        cluster.send("remove")
        wait_for(1)
        cluster.send("add")
        wait_for(2)
        folder = RunFiles(run.folder, "elastic").newest
        assert scale.main([str(folder), "3"]) == 2
        assert "3 replicas, expected 1 (rollout.min_replicas) to 2 (rollout.replicas)" in capsys.readouterr().err
        assert scale.main([str(folder), "1"]) == 0
        wait_for(1)
        assert scale.main([str(folder), "2"]) == 0
        wait_for(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM, run.output  # a run without checkpoints ends at once
    finally:
        cluster.close()
    assert scale.main([str(folder), "1"]) == 2 and "the run has ended" in capsys.readouterr().err
    assert "leaves the run until it can join again" in run.output
    assert run.output.count("has joined; 2 replicas of 2") == 2 and "has left; 1 replica of 2" in run.output
    assert all(row["weight_sync/verified"] == 1 for row in steps)
    assert all(row["training/off_policy/trajectory_staleness_worst"] <= 1 for row in steps)
    trained = [group for row in read_jsonl(folder / "batch_order.jsonl") for group in row["groups"]]
    assert len(trained) == len(set(trained)), "no prompt is trained twice"
    admitted_last = 2 * 24  # (max_staleness + 1) batches are in flight at the end
    assert set(trained) >= set(range(len(trained) - admitted_last)), "no prompt is lost"


def test_the_trainers_devices_generate_while_it_waits(small: list[str], start: Callable[..., CliRun]) -> None:
    """The second replica is on the trainer's device; its requests move to the first one before each update."""
    run = start(
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=hybrid", "sync.verify_freq=1"),
        *("async_training.hybrid_rollout=true", "async_training.max_staleness=1", "trainer.total_training_steps=4"),
        *("data.max_response_length=64", "actor_rollout_ref.rollout.max_num_seqs=2", "trainer.test_freq=2"),
        "trainer.val_before_train=true",
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
    trained = [group for row in read_jsonl(files.newest / "batch_order.jsonl") for group in row["groups"]]
    assert sorted(trained) == list(range(4 * 24)), "no prompt is lost or trained twice"
