import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.scripts.scripts import start
from support.expected_errors import raises

from megarl.ops.launch.settings import ClusterSettings, JobToRun, Ports, node_ports, ray_environment, ray_start

JOB = JobToRun(("python", "x.py"), False, "x", 2, "cpu", 4)


def options(argv):
    return dict(word.removeprefix("--").split("=", 1) for word in argv if word.startswith("--") and "=" in word)


@pytest.mark.parametrize("head", ["", "10.0.0.1:6400"])
def test_options_exist_in_the_installed_ray(head):
    settings = ClusterSettings(("a", "b"), "python", object_store_bytes=10**8)
    argv = ray_start(settings, JOB, "a", "10.0.0.1", head, Ports(), "/tmp/x")
    available = {name for parameter in start.params for name in parameter.opts}
    assert {word.split("=")[0] for word in argv if word.startswith("--")} <= available
    assert ("--head" in argv) == (not head)
    assert "stop" not in argv


def test_addresses_of_head_and_node():
    head = options(ray_start(ClusterSettings(("a",), "p"), JOB, "a", "10.0.0.1", "", Ports(), "/t"))
    assert head["dashboard-host"] == "127.0.0.1"
    assert (head["node-name"], head["node-ip-address"], head["num-cpus"]) == ("a", "10.0.0.1", "4")
    node = options(ray_start(ClusterSettings(("a",), "p"), JOB, "b", "", "10.0.0.1:6400", Ports(), "/t"))
    assert node["address"] == "10.0.0.1:6400"
    assert not {"port", "dashboard-host", "node-ip-address"} & set(node)


def test_ray_counts_the_gpus():
    job = JobToRun(("x",), False, "x", 1, "cuda", 8)
    assert not {"num-gpus", "num-cpus"} & set(
        options(ray_start(ClusterSettings(("a",), "p"), job, "a", "", "", Ports(), "t"))
    )


@given(st.integers(1024, 9000), st.integers(1, 20))
def test_nodes_on_one_machine_share_no_port(first, nodes):
    hosts = tuple(f"127.0.0.{2 + node}" for node in range(nodes))
    ports = node_ports(ClusterSettings(hosts, "p", ports=Ports(first)))
    used = [port for p in ports.values() for port in (p.gcs, p.dashboard, *p.of_node().values())]
    assert len(set(used)) == len(used) == 8 * nodes
    assert not set(used) & set(range(10002, 20000))


def test_separate_machines_use_the_same_ports():
    ports = node_ports(ClusterSettings(("node1", "node2"), "p"))
    assert ports["node1"] == ports["node2"]


@pytest.mark.parametrize(
    ("first", "code"), [(80, "launch.port-range"), (65530, "launch.port-range"), (9998, "launch.port-overlap")]
)
def test_invalid_ports(first, code):
    with raises(code, f"--port={first}", "--worker-ports=10002-19999"):
        Ports(first, (10002, 19999))


def test_records_of_calls_in_the_gcs_are_limited():
    assert int(ray_environment("/t/token")["RAY_task_events_max_num_task_in_gcs"]) <= 10_000


def test_ray_calls_no_process_dead_before_its_collective_fails():
    assert int(ray_environment("/t/token")["RAY_grpc_client_keepalive_time_ms"]) > 1800 * 1000


def test_token_is_always_required():
    assert ray_environment("/t/token")["RAY_AUTH_MODE"] == "token"
    assert "RAY_ADDRESS" not in ray_environment("/t/token")
    assert ray_environment("/t/token", "a:1", loopback=True)["RAY_ADDRESS"] == "a:1"
