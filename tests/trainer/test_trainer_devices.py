"""Devices of a job: the check of this machine before Ray starts, and the kind of device."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from support.expected_errors import raises

from megarl.base.errors import ConfigError, ResourceError
from megarl.config.schema.model import OwnDevicesConfig
from megarl.config.schema.run import RunConfig
from megarl.trainer.roles import devices
from megarl.trainer.roles.devices import check_dashboard, check_devices, resolve_device


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def run(**keys):
    return dataclasses.replace(RunConfig(experiment_name="x"), **keys)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda")])
def test_auto_is_cuda_if_the_cluster_has_a_gpu(gpus, device):
    nodes = [{"CPU": 4.0}, {"CPU": 4.0, "GPU": float(gpus)}]
    assert resolve_device("auto", nodes) == device and resolve_device("cpu", nodes) == "cpu"


@pytest.mark.parametrize(
    ("cpus", "gpus", "keys", "code", "named"),
    [
        (64, 0, {"device": "cuda"}, "ray.no-gpu", ["0 GPUs and 64 CPU cores", "trainer.device=cpu"]),
        (64, 4, {"device": "cuda"}, "ray.too-few-gpus", ["4 GPUs and 64 CPU cores", "at most 4"]),
        (64, 4, {"device": "auto"}, "ray.too-few-gpus", ["trainer.device=auto (cuda)", "4 GPUs"]),
        (4, 8, {"device": "cuda"}, "ray.too-few-cores", ["8 GPUs and 4 CPU cores", "at most 4"]),
        (2, 0, {"device": "cpu"}, "ray.too-few-cores", ["at most 2", "ray start --head --num-cpus=8"]),
        (2, 0, {"device": "auto"}, "ray.too-few-cores", ["trainer.device=auto (cpu)", "0 GPUs and 2 CPU cores"]),
        (64, 8, {"nnodes": 2}, "ray.needs-cluster", ["2 nodes", "megarl launch", "RAY_ADDRESS"]),
    ],
)
def test_too_few_devices_are_an_error_with_a_remedy(monkeypatch, cpus, gpus, keys, code, named):
    monkeypatch.setattr(devices, "local_node", lambda: {"CPU": float(cpus), "GPU": float(gpus)})
    with raises(code, "trainer.nnodes=", "trainer.n_gpus_per_node=8", *named, error=ConfigError):
        check_devices(run(n_gpus_per_node=8, **keys))


def test_enough_devices_pass(monkeypatch):
    monkeypatch.setattr(devices, "local_node", lambda: {"CPU": 8.0, "GPU": 8.0})
    check_devices(run(n_gpus_per_node=8, device="auto"))
    check_devices(run(n_gpus_per_node=8, device="cpu"))


def test_hidden_gpus_are_named(monkeypatch):
    monkeypatch.setattr(devices, "local_node", lambda: {"CPU": 8.0, "GPU": 1.0})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with raises("ray.too-few-gpus") as caught:
        check_devices(run(n_gpus_per_node=2, device="cuda"))
    assert str(caught.value) == (
        "trainer.nnodes=1, trainer.n_gpus_per_node=2, trainer.device=cuda: this machine has 1 GPU and 8 CPU cores "
        "(CUDA_VISIBLE_DEVICES='3'): set trainer.n_gpus_per_node to at most 1, or make more of them visible "
        "(CUDA_VISIBLE_DEVICES, the scheduler's GPU request) [ray.too-few-gpus]"
    )


def test_devices_of_a_cluster_are_not_those_of_this_machine(monkeypatch):
    """The cluster is only probed: its devices are counted after the connection."""
    probed: list[str] = []
    monkeypatch.setattr(devices, "check_cluster_answers", probed.append)
    monkeypatch.setattr(devices, "local_node", lambda: pytest.fail("this machine is not asked"))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_devices(run(n_gpus_per_node=8, nnodes=100, device="cuda"))
    assert probed == ["head:6379"]


def test_a_dead_cluster_is_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
    with raises("ray.no-cluster", "127.0.0.1:", error=ResourceError):
        check_devices(run())


def test_a_dashboard_needs_its_packages_if_the_run_starts_ray(monkeypatch):
    monkeypatch.setattr(devices, "dashboard_error", lambda: "No module named 'aiohttp_cors'")
    check_dashboard(run())
    with raises("ray.no-dashboard", "trainer.ray_dashboard=true", "'aiohttp_cors'", "ray[default]"):
        check_dashboard(run(ray_dashboard=True))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_dashboard(run(ray_dashboard=True))


def test_roles_with_devices_of_their_own_need_devices_beside_the_trainers(monkeypatch):
    monkeypatch.setattr(devices, "local_node", lambda: {"CPU": 8.0, "GPU": 4.0})
    own = {"critic": OwnDevicesConfig(1, 1), "actor_rollout_ref.ref": OwnDevicesConfig(1, 1)}
    check_devices(run(n_gpus_per_node=2, device="cuda"), own)
    sizes = "trainer.n_gpus_per_node=2, critic.nnodes=1, critic.n_gpus_per_node=2, "
    with raises("ray.too-few-devices", sizes, "ref.nnodes=1", "5 needed, 4 available", "'critic'", error=ConfigError):
        check_devices(run(n_gpus_per_node=2, device="cuda"), own | {"critic": OwnDevicesConfig(1, 2)})
