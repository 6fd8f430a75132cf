"""The launcher over ssh, between hosts with addresses and process tables of their own."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from support.waits import wait_until

SIZE = ("--no-doctor", "--nodes", "2", "--devices-per-node", "1", "--device", "cpu")
TWO, SPARE = ("--hosts", "h1,h2"), ("--hosts", "h1,h2,h3")
JOIN = """
import sys, time, pathlib
from megarl.cluster.session import RaySession
import ray
first = not pathlib.Path(sys.argv[1]).exists()
pathlib.Path(sys.argv[1]).touch()
with RaySession():
    print("NODES", sorted(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']), sys.executable, flush=True)
    time.sleep(float(sys.argv[2]) if first else 0)
"""


@pytest.fixture
def join(shared, request):
    """Return a command that joins the cluster, prints its nodes, and stays for some seconds in its first run."""

    def command(seconds=0.0):
        return [*SIZE, "--", "python", "-c", JOIN, str(shared / f"{request.node.name}.ran"), str(seconds)]

    return command


def test_a_job_over_two_hosts(launch, grpo):
    run = launch(*TWO, *grpo, "trainer.total_training_steps=2")
    assert run.code() == 0, run.text()
    assert re.search(r"doctor: \d+ checks passed", run.text())
    assert "h1 (10.77.0.11), h2 (10.77.0.12)" in run.text()


def test_python_is_the_launchers_interpreter(launch, join):
    run = launch(*TWO, *join())
    assert run.code() == 0, run.text()
    assert run.until(r"NODES \['10.77.0.11', '10.77.0.12'\] (\S+)")[1] == sys.executable


@pytest.mark.parametrize("host", ["h1", "h2"])
def test_a_used_port(launch, hosts, join, host):
    server = hosts.start(host, Path("/dev/null"), ["timeout", "60", "python3", "-m", "http.server", "6403"])
    wait_until(lambda: ":6403 " in hosts.on(host, "ss", "-Hltn"))
    run = launch(*TWO, *join())
    assert run.code() == 1
    assert re.search(rf"{host}: port .*6403.* .* --port", run.text()), run.text()
    hosts.on(host, "pkill", "-f", "http.server")
    server.wait(60)


def test_an_interpreter_that_is_missing_on_a_host(launch, hosts, join):
    hosts.on("h1", "sh", "-c", f"mkdir /tmp/env && ln -s {sys.executable} /tmp/env/python")
    run = launch(*TWO, "--python", "/tmp/env/python", *join())
    assert run.code() == 1
    assert re.search(r"h2.*\n.*/tmp/env/python: not found", run.text()) or "h2" in run.text(), run.text()
    hosts.on("h1", "rm", "-r", "/tmp/env")


def test_a_folder_that_is_missing_on_a_host(launch, hosts, join):
    hosts.on("h1", "mkdir", "/tmp/checkout")
    run = launch(*TWO, "--workdir", "/tmp/checkout", *join())
    assert run.code() == 1
    assert re.search(r"h2 is lost: .*/tmp/checkout", run.text()), run.text()
    hosts.on("h1", "rmdir", "/tmp/checkout")


def test_a_host_that_refuses_the_key(launch, hosts, join):
    hosts.on("h2", *f"mount --bind /dev/null {hosts.state}/id.pub".split())
    run = launch(*TWO, *join())
    assert run.code() == 1
    assert re.search(r"h2 is lost: .*Permission denied", run.text()), run.text()
    hosts.on("h2", "umount", f"{hosts.state}/id.pub")


def test_a_name_that_does_not_resolve(launch, join):
    run = launch("--hosts", "h1,h9", *join())
    assert run.code() == 1
    assert re.search(r"h9 is lost: .*resolve", run.text()), run.text()


def test_an_unplugged_host(launch, hosts, join):
    hosts("cut", "h2")
    run = launch(*TWO, *join())
    assert run.code() == 1
    assert "h2" in run.text()


def test_a_silent_host_is_replaced_by_the_spare(launch, hosts, join):
    run = launch(*SPARE, "--max-restarts", "1", "--restart-delay", "1", *join(600))
    run.until(r"NODES \[")
    hosts("cut", "h2")
    assert run.code() == 0, run.text()
    assert "node h2 is lost" in run.text()
    assert "NODES ['10.77.0.11', '10.77.0.13']" in run.text()


def test_a_silent_host_that_comes_back(launch, hosts, join):
    run = launch(*TWO, "--max-restarts", "2", "--restart-delay", "1", *join(600))
    run.until(r"NODES \[")
    hosts("cut", "h2")
    run.until("Restart 1 of 2")
    hosts("mend", "h2")
    assert run.code() == 0, run.text()
    assert run.text().count("NODES ['10.77.0.11', '10.77.0.12']") == 2


def test_a_killed_launcher_leaves_nothing(launch, join):
    run = launch(*TWO, *join(600))
    run.until(r"NODES \[")
    run.signal(signal.SIGKILL)
    run.process.wait(60)


def test_ctrl_c_saves(launch, grpo):
    run = launch(*TWO, "--no-doctor", *grpo, "trainer.total_training_steps=50", "trainer.save_freq=50")
    run.until(r"(?m)^.*step[: ]+1\b")
    run.signal(signal.SIGINT)
    assert run.code() != 0
    assert re.search(r"Ended after step \d+ of 50 \(Ctrl-C\), saved in", run.text()), run.text()


def test_two_launches_side_by_side(launch, join):
    first = launch(*TWO, *join(600))
    first.until(r"NODES \[")
    refused = launch(*TWO, *join())
    assert refused.code() == 1
    assert re.search(r"h1: port .*6400.* --port", refused.text()), refused.text()
    second = launch(*TWO, "--port", "6500", "--worker-ports", "20000-29999", *join())
    assert second.code() == 0, second.text()
    assert first.process.poll() is None
    first.signal(signal.SIGTERM)
    first.code()


def test_a_host_without_the_token_cannot_join(launch, hosts, join):
    run = launch(*TWO, *join(600))
    run.until(r"NODES \[")
    client = "import ray; ray.init(address='10.77.0.11:6400', log_to_driver=False); print('JOINED')"
    for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}):
        variables = " ".join(f"{name}={value}" for name, value in token.items())
        shell = f'{variables} timeout 60 {sys.executable} -c "{client}" 2>&1 || true'
        text = hosts.on("h3", "sh", "-c", shell)
        assert "JOINED" not in text
        assert "uthentica" in text or "InvalidAuthToken" in text, text
    run.signal(signal.SIGTERM)
    run.code()


def test_disaggregated_training_over_two_hosts(launch, grpo):
    run = launch(
        *TWO,
        "--no-doctor",
        *(key for key in grpo if not key.startswith("trainer.nnodes")),
        *("trainer.nnodes=1", "async_training.mode=disaggregated", "async_training.max_staleness=1"),
        *(
            "algorithm.rollout_correction.rollout_is=token",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        ),
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
    )
    assert run.code() == 0, run.text()
