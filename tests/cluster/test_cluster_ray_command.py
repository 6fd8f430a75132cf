"""Parameters of a launched node that Ray's command line has no options for."""

import pytest
from ray._private.parameter import RayParams

from megarl.cluster import fork_client
from megarl.cluster.ray_command import node_parameters
from megarl.ops.launch.settings import ClusterSettings, JobToRun, Ports, ray_start

SOCKET = {fork_client.ADDRESS: "/run/server/socket"}


def start(device):
    job = JobToRun(("x",), False, "x", 1, device, 2)
    return ray_start(ClusterSettings(("a",), "p"), job, "a", "", "", Ports(), "/t")


@pytest.mark.parametrize(
    ("device", "environ", "script"),
    [
        ("cpu", SOCKET, fork_client.__file__),
        ("cuda", SOCKET, None),  # a fork must not inherit the state of CUDA
        ("cpu", {}, None),
        ("cpu", {fork_client.ADDRESS: "0"}, None),
        ("cpu", {fork_client.ADDRESS: "1"}, None),
    ],
)
def test_workers_on_cpus_are_forks_if_a_server_is_named(device, environ, script):
    parameters = node_parameters(start(device), environ)
    assert parameters.get("setup_worker_path") == script


def test_ray_knows_each_parameter():
    node = RayParams(ray_client_server_port=10001)
    node.update(**node_parameters(start("cpu"), SOCKET))
    assert node.no_monitor and not node.include_log_monitor and node.ray_client_server_port is None
