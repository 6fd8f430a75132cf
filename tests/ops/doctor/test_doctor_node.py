"""Checks of one machine in real situations: a full disk, little shared memory, a port in use."""

import json
import os
import resource
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.cli import main
from megarl.config import TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.doctor import node
from megarl.ops.doctor.node import CheckResult, Needs, NodeReport, Status, check_node, needs_of
from megarl.ops.doctor.node import system as checks
from megarl.ops.doctor.node.results import reports_table
from megarl.ops.doctor.node.system import (
    check_checkpoint_room,
    check_disk_speed,
    check_engine_package,
    check_folders,
    check_hostname,
    check_logins,
    check_peers,
    check_ports,
)

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
FAULTY = """
mount -t tmpfs -o size=4m tmpfs /dev/shm
mount -t tmpfs -o size=16m tmpfs {disk}
ulimit -n 512
ulimit -u 2000
exec {python} -m megarl.cli doctor --json --checkpoint-dir {disk}/run/checkpoints --port {port}
"""


@contextmanager
def listener():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


def by_check(report):
    return {result.check: result for result in report.results}


def test_all_faults_of_a_machine_are_reported(tmp_path):
    with listener() as port:
        script = FAULTY.format(disk=tmp_path, python=sys.executable, port=port)
        command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-ec", script]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1, process.stderr
    report = NodeReport.from_json(process.stdout)
    assert not report.ok and report.host == socket.gethostname()
    results = by_check(report)
    shared, disk, files = results["shared memory"], results["disk speed"], results["open files"]
    assert shared.status is Status.FAIL and "of 4 MiB" in shared.observation and "remount,size=2G" in shared.remedy
    assert disk.status is Status.FAIL and "No space left on device" in disk.observation
    assert results["checkpoint folder"].status is Status.WARN
    assert files.status is Status.FAIL and files.observation.startswith("512 ") and "limits.conf" in files.remedy
    assert results["processes"].status is Status.WARN and "2,000" in results["processes"].observation
    sandbox = results["code sandbox"]
    # no second user is mapped
    assert sandbox.status is Status.WARN and "no sandbox on this machine" in sandbox.observation
    assert "reward.sandbox.url" in sandbox.remedy
    held = results["port"]
    assert held.status is Status.FAIL and held.observation.startswith(f"{port} is held by")
    reduced = results["all-reduce (gloo)"]  # still runs
    assert reduced.status is not Status.FAIL and reduced.observation.startswith("2 ranks on this node: ")
    assert report.facts["python"] == ".".join(map(str, sys.version_info[:3]))


def test_report_round_trips_through_json_and_prints_as_a_table():
    results = [CheckResult("disk", Status.WARN, "full", "empty it"), CheckResult("cores", Status.PASS, "2")]
    report = NodeReport("one", results, {"torch": "2"})
    assert NodeReport.from_json(json.dumps(report.to_json())) == report and report.ok
    text = reports_table([report])
    assert text.splitlines() == [
        "== one",
        "warn  disk   full",
        "             -> empty it",
        "pass  cores  2",
        text[-22:],
    ]
    assert text.endswith("1 pass, 1 warn, 0 fail")
    with pytest.raises(ValueError, match="not a report of `megarl doctor --json`"):
        NodeReport.from_json('{"host": "one"}')


@pytest.mark.parametrize(("soft", "status"), [(1023, Status.FAIL), (1024, Status.WARN), (8192, Status.PASS)])
def test_open_files(soft, status):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        assert checks.check_open_files(Needs()).status is status
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_memory_is_limited_by_the_machine_and_the_container(tmp_path, monkeypatch):
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)  # others allocate and free meanwhile
    free = memory.available
    assert checks.check_memory(Needs(host_bytes=free // 2)).status is Status.PASS
    assert checks.check_memory(Needs(host_bytes=free * 3 // 2)).status is Status.WARN
    short = checks.check_memory(Needs(host_bytes=free * 4))
    assert short.status is Status.FAIL and "offload less" in short.remedy
    assert checks.free_cgroup_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text("5\n", encoding="utf-8")
    assert checks.free_cgroup_bytes(tmp_path) is None  # no limit
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text(f"{GIB}\n", encoding="utf-8")
    assert checks.free_cgroup_bytes(tmp_path) == 3 * GIB
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2 * GIB), encoding="utf-8")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(3 * GIB), encoding="utf-8")
    assert checks.free_cgroup_bytes(tmp_path) == 0  # cgroup version 1, above its limit


def test_used_shared_memory_has_another_remedy_than_too_little(tmp_path):
    total = os.statvfs(tmp_path)
    size = total.f_blocks * total.f_frsize
    held = checks.check_shared_memory(Needs(shared_memory_bytes=size), str(tmp_path))
    assert held.status is Status.FAIL and "other processes hold it" in held.remedy  # a part of a disk is always in use
    little = checks.check_shared_memory(Needs(shared_memory_bytes=2 * size), str(tmp_path))
    assert little.status is Status.FAIL and "remount" in little.remedy
    assert checks.check_shared_memory(Needs(), str(tmp_path / "none")).status is Status.FAIL


def test_cores_for_devices():
    cores = len(os.sched_getaffinity(0))
    assert checks.check_cores(Needs(devices=cores)).status is Status.PASS
    assert checks.check_cores(Needs(devices=cores + 1)).status is Status.WARN


def test_locked_memory_is_checked_with_infiniband_only(tmp_path):
    assert checks.check_locked_memory(Needs(), str(tmp_path)) == []
    (tmp_path / "mlx5_0").mkdir()
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    (result,) = checks.check_locked_memory(Needs(), str(tmp_path))
    assert result.status is (Status.PASS if unlimited else Status.WARN)


def test_unresolvable_names(monkeypatch):
    assert check_peers(Needs()) == []
    (reached,) = check_peers(Needs(peers=("localhost",)))
    assert reached.status is Status.PASS
    (missing,) = check_peers(Needs(peers=("localhost", "node-7.invalid")))
    assert (
        missing.status is Status.FAIL
        and "node-7.invalid (" in missing.observation
        and "localhost" not in missing.observation
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert check_hostname(Needs(nodes=1)).status is Status.PASS
    alone = check_hostname(Needs(nodes=2))
    assert alone.status is Status.WARN and "other nodes cannot reach" in alone.observation
    monkeypatch.setattr(socket, "gethostname", lambda: "unknown.invalid")
    assert check_hostname(Needs()).status is Status.FAIL


def test_watched_ports_warn_and_required_ports_fail():
    with listener() as port:
        (warned,) = check_ports(Needs(watched_ports=(port,)))
        assert warned.status is Status.WARN and "RAY_ADDRESS" in warned.remedy
        (failed,) = check_ports(Needs(ports=(port,), watched_ports=()))
        assert failed.status is Status.FAIL and f"process {os.getpid()} (" in failed.observation
    (free,) = check_ports(Needs(ports=(port,), watched_ports=()))
    assert free.status is Status.PASS and free.observation == f"{port} is free"


@contextmanager
def not_root():
    """Switch to an unprivileged user: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that other users may enter, unlike pytest's."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_unreadable_models_and_unwritable_checkpoint_folders(open_folder):
    model, missing = open_folder / "model", open_folder / "data.parquet"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    shard = model / "model.safetensors"
    shard.write_bytes(b"weights")
    needs = Needs(models=(str(model),), readable=(str(missing),), checkpoint_dir=str(open_folder / "a" / "b"))
    results = {result.check: result for result in check_folders(needs)}
    assert results["model"].status is Status.PASS
    assert results["data"].status is Status.FAIL and f"{missing}: No such file" in results["data"].observation
    shard.chmod(0)
    open_folder.chmod(0o555)
    with not_root():
        assert check_folders(needs)[0].observation == f"{shard}: Permission denied"
        (refused,) = check_checkpoint_room(needs)
    assert refused.status is Status.FAIL and "Permission denied" in refused.observation
    open_folder.chmod(0o755)
    (model / "config.json").unlink()
    shard.chmod(0o644)
    assert check_folders(needs)[0].observation == f"{model}: has no config.json"


def test_space_for_two_checkpoints(tmp_path):
    assert check_checkpoint_room(Needs()) == []
    folder = str(tmp_path / "runs" / "checkpoints")
    free = os.statvfs(tmp_path)
    room = free.f_bavail * free.f_frsize
    cases = {room // 4: Status.PASS, room * 3 // 4: Status.WARN, room * 2: Status.FAIL}
    for size, status in cases.items():
        (result,) = check_checkpoint_room(Needs(checkpoint_dir=folder, checkpoint_bytes=size))
        assert result.status is status, size
    (tmp_path / "runs").write_text("a file", encoding="utf-8")
    (result,) = check_checkpoint_room(Needs(checkpoint_dir=folder))
    assert result.status is Status.FAIL and "is a file" in result.observation


def test_time_of_a_checkpoint_from_the_disk_speed(tmp_path):
    folder = str(tmp_path)
    (fast,) = check_disk_speed(Needs(checkpoint_dir=folder, checkpoint_bytes=64 * 2**20))
    assert fast.status is Status.PASS and "part of a checkpoint takes about" in fast.observation
    (slow,) = check_disk_speed(Needs(checkpoint_dir=folder, checkpoint_bytes=10**15))
    assert slow.status is Status.WARN and "trainer.save_freq" in slow.remedy
    assert not list(tmp_path.iterdir())
    assert check_disk_speed(Needs(quick=True)) == []


def test_exception_in_a_check_fails_only_that_check(monkeypatch):
    def check_weather(needs):
        raise OSError("no window")

    monkeypatch.setattr(node, "CHECKS", (check_weather, *node.CHECKS))
    report = check_node(Needs(quick=True))
    assert report.results[0].observation.endswith("OSError: no window") and report.results[0].check == "weather"
    assert len(report.results) > 5 and not report.ok


def test_command_refuses_invalid_arguments(capsys):
    assert main(["doctor", "trainer.nnodes=2"]) == 2
    assert capsys.readouterr().err == "trainer.nnodes=2: overrides need a --config-name [doctor.no-config-name]\n"
    assert main(["doctor", "--config-name", "quickstart", "trainer.nodes=2"]) == 2
    assert "trainer.nnodes" in (text := capsys.readouterr().err) and "[config.unknown-key]" in text
    assert main(["doctor", "--nodes", "--address", "not an address", "--quick"]) == 1
    assert capsys.readouterr().err.endswith("[ray.no-cluster]\n")


def test_engine_and_logins_of_the_configuration_are_checked(monkeypatch, tmp_path):
    """With the messages of a run's preflight."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sglang", None)
    overrides = (
        "trainer.logger=[console,wandb]",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
    )
    needs = needs_of(compose(ConfigRequest(TrainConfig, "quickstart", overrides)))
    (engine,) = check_engine_package(needs)
    assert engine.status is Status.FAIL and engine.observation.endswith("[sglang.not-installed]")
    console, wandb = check_logins(needs)
    assert (console.status, wandb.status) == (Status.PASS, Status.FAIL) and wandb.observation.endswith(
        "[tracking.no-login]"
    )
    assert check_engine_package(Needs()) == check_logins(Needs()) == []
