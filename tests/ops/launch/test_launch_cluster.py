"""Clusters of several Ray nodes on this machine, at separate loopback addresses."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import ray
from support.listeners import assert_on_loopback, listening_processes

from megarl.base.processes import command_line, process_name

HERE = Path(__file__).parent
TWO = ("--no-doctor", "--nodes=2", "--devices-per-node=1", "--device=cpu")
DRIVER = str(HERE / "two_nodes.py")


def runs_of(folder):
    return [json.loads(line) for line in (folder / "runs.json").read_text(encoding="utf-8").splitlines()]


def test_worker_group_over_two_nodes_by_ssh(
    start_launcher, fake_commands, first_port, warm_script, shared_server, tmp_path
):
    """The Ray cluster of another user on the machine keeps running."""
    foreign = subprocess.Popen(
        [sys.executable, str(HERE / "foreign_ray.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert foreign.stdout.readline() == "up\n"
    launched = start_launcher(
        *TWO,
        f"--port={first_port}",
        "--hosts=127.0.0.2,127.0.0.3",
        "--env=MEGARL_TEST=a value; of two words",
        "--",
        *warm_script,
        DRIVER,
        str(tmp_path),
        "hang",
        **shared_server,
    )
    assert launched.code() == 0, launched.text()
    (run,) = runs_of(tmp_path)
    assert run["address"] == f"127.0.0.2:{first_port}"
    assert run["hang"]["total"] == [3.0, 3.0]
    assert run["given"] == "a value; of two words"
    assert not Path(run["token"]).exists()
    assert launched.survivors() == []
    assert "the driver is at work" in launched.text()
    calls = fake_commands.calls("ssh")
    assert sorted(call["arguments"][-2] for call in calls) == ["127.0.0.2", "127.0.0.3"]  # in parallel
    assert all("BatchMode=yes" in call["arguments"] for call in calls)
    assert not any("MEGARL_TEST" in word for call in calls for word in call["arguments"])
    foreign.stdin.write("\n")
    foreign.stdin.flush()
    assert foreign.stdout.readline() == "3\n", "the other Ray cluster still works"
    assert foreign.wait(180) == 0
    check_stall_on_the_other_node(run["hang"], tmp_path)


def check_stall_on_the_other_node(hang, folder):
    """The driver's folder has the stacks of both nodes, and the hung process was killed on its node."""
    driver, far = hang["driver"], hang["far"]
    pids = {host: pid for _, _, pid, host in hang["members"]}
    assert pids.keys() == {"127.0.0.2", "127.0.0.3"}
    assert hang["inspected"] == {host: [host, [pid]] for host, pid in pids.items()}, "one task per node"
    # Both nodes share this machine's clock, so the measured offset is within the reported error.
    (remote,) = pids.keys() - {driver}
    assert hang["offsets"][driver] == [0, 0]
    ahead_ns, error_ns = hang["offsets"][remote]
    assert error_ns > 0 and abs(ahead_ns) <= error_ns
    line = hang["stall"].splitlines()[1]
    assert re.match(
        rf"  actor rank {far} on {remote} is in update .*, at hang \(tests/cluster/hanging_workers\.py:\d+\); ", line
    )
    assert f"actor rank {1 - far} waits for it in all_reduce #3 of all ranks [0, 1]" in line
    (stall,) = (folder / "stalls").iterdir()
    stack = (stall / f"actor-{far}.txt").read_text(encoding="utf-8")
    assert stack.startswith(f"actor rank {far}, pid {pids[remote]} on {remote}: ") and "in hang" in stack
    assert "all_reduce #3 of all ranks [0, 1]" in (stall / f"actor-{1 - far}.txt").read_text(encoding="utf-8")
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_lost_node_is_named_and_the_job_restarts_by_srun(
    start_launcher, fake_commands, first_port, warm_script, shared_server, tmp_path
):
    launched = start_launcher(
        *TWO,
        f"--port={first_port}",
        *("--on=slurm", "--max-restarts=1", "--restart-delay=0.1", "--", *warm_script, DRIVER, str(tmp_path), "lose"),
        SLURM_JOB_NODELIST="local[2-3]",
        SLURM_CPUS_ON_NODE="2",
        **shared_server,
    )
    launched.until("the driver is at work")
    (raylet,) = [
        p
        for p in launched.survivors()
        if process_name(p) == "raylet" and "--node_ip_address=127.0.0.3" in command_line(p)
    ]
    raylet.kill()
    assert launched.code() == 0, launched.text()
    text = launched.text()
    assert "node 127.0.0.3 is lost: its Ray ended with code 1" in text and "[launch.node-lost]. Restart" in text
    assert "Restart 1 of 1 in 0.1 s" in text
    assert "driver: sleeper rank" in text and "127.0.0.3) died in sleep" in text
    assert len(runs_of(tmp_path)) == 2
    assert launched.survivors() == []
    calls = [call["arguments"] for call in fake_commands.calls("srun")]
    assert len(calls) == 4
    assert all("--cpus-per-task=2" in call and "--overlap" in call for call in calls)
    nodes = {part for call in calls[:2] for part in call if part.startswith("--nodelist=")}  # started in parallel
    assert nodes == {"--nodelist=127.0.0.2", "--nodelist=127.0.0.3"}


def test_local_cluster_refuses_clients_without_token_and_ends_on_sigterm(start_launcher, first_port):
    driver = (
        "import os, time; address, token = os.environ['RAY_ADDRESS'], os.environ['RAY_AUTH_TOKEN_PATH']; "
        "print(f'{address} {token}', flush=True); time.sleep(600)"
    )
    options = ("--on=local", "--no-doctor", "--nodes=1", "--devices-per-node=1", "--device=cpu")
    launched = start_launcher(*options, f"--port={first_port}", "--max-restarts=3", "--", sys.executable, "-c", driver)
    token = launched.until(rf"127\.0\.0\.1:{first_port} (\S+/megarl-\S+)\n")[1]
    assert Path(token).stat().st_mode & 0o077 == 0
    assert_on_loopback(listening_processes(launched.survivors()), "gcs_server", "raylet")
    client = f"import ray; ray.init(address='127.0.0.1:{first_port}', logging_level='ERROR')"
    env = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "1"}
    env["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # a refused client tries again every second
    process = subprocess.run([sys.executable, "-c", client], env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode != 0 and "AuthenticationError" in process.stderr + process.stdout, process.stderr
    launched.process.send_signal(signal.SIGTERM)
    assert launched.code() == 128 + signal.SIGTERM
    assert launched.survivors() == []
    assert "Restart" not in launched.text()
    assert not ray.is_initialized()


def test_job_on_a_running_cluster_is_restarted_there(start_launcher, first_port, tmp_path):
    """The launcher with ``--on local-ray`` runs in the cluster of another, with its token, and leaves it running."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys, ray\nfrom pathlib import Path\nfrom megarl.cluster.session import RaySession\n"
        "with RaySession() as session:\n    print('joined', session.address, len(ray.nodes()), flush=True)\n"
        "first = not Path('ran').exists()\nPath('ran').touch()\nsys.exit(3 if first else 0)\n",
        encoding="utf-8",
    )
    node = ("--no-doctor", "--nodes=1", "--devices-per-node=1", "--device=cpu")
    inner = ("-m", "megarl.ops.launch", "--on=local-ray", "--max-restarts=1", "--restart-delay=0", *node)
    job = (sys.executable, *inner, "--", sys.executable, str(driver))
    launched = start_launcher("--on=local", *node, f"--port={first_port}", "--", *job)
    assert launched.code() == 0, launched.text()
    assert launched.text().count(f"joined 127.0.0.1:{first_port} 1\n") == 2
    assert "launch: the driver ended with code 3. Restart 1 of 1" in launched.text()
