import pytest
from support.expected_errors import raises

from megarl.ops.launch.remote import (
    forwarded_environment,
    local_hosts,
    parse_hosts,
    slurm_hosts,
    srun_agent,
    ssh_agent,
)


def test_ssh_starts_the_agent_in_the_folder_without_a_password():
    argv = ssh_agent("/env/bin/python", "/work dir", ["ssh", "-p", "22"], ["apptainer", "exec", "i.sif"])("gpu1")
    assert argv[:3] == ["ssh", "-p", "22"] and argv[-2] == "gpu1"
    assert argv[-1] == "cd '/work dir' && exec apptainer exec i.sif /env/bin/python -m megarl.ops.launch.agent"
    assert "BatchMode=yes" in argv


def test_srun_starts_the_agent_with_all_cpus_of_the_node():
    argv = srun_agent("python", "/w", ["srun", "--mem=0"], [], {"SLURM_CPUS_ON_NODE": "96"})("n1")
    assert argv[:2] == ["srun", "--mem=0"]
    assert {"--nodelist=n1", "--ntasks=1", "--overlap", "--cpus-per-task=96", "--chdir=/w"} <= set(argv)
    assert argv[-3:] == ["python", "-m", "megarl.ops.launch.agent"]


def test_hosts_from_a_list_or_a_file(tmp_path):
    assert parse_hosts("a,b, c") == ["a", "b", "c"]
    file = tmp_path / "hosts.txt"
    file.write_text("# the head\nnode1 slots=8\n\nnode2  # the other\n", encoding="utf-8")
    assert parse_hosts(str(file)) == ["node1", "node2"]


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (" , ", "launch.no-host", "--hosts= , "),
        ("a,b,a", "launch.duplicate-host", "names a more"),
        ("-oX", "launch.host-name", "-oX"),
    ],
)
def test_invalid_hosts(text, code, named):
    with raises(code, named):
        parse_hosts(text)


def test_hosts_on_this_machine():
    assert local_hosts(1) == ["127.0.0.1"]
    assert local_hosts(3) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


def test_hosts_of_a_slurm_allocation(fake_commands, monkeypatch):
    for name, value in fake_commands.environment().items():
        monkeypatch.setenv(name, value)
    assert slurm_hosts({"SLURM_JOB_NODELIST": "local[2-3]"}) == ["127.0.0.2", "127.0.0.3"]
    with raises("launch.no-allocation", "SLURM_JOB_NODELIST"):
        slurm_hosts({})


def test_credentials_of_other_programs_stay_here():
    forwarded = {
        "DATA": "/data",
        "MODEL": "/m",
        "RETRIEVER": "http://r",
        "TORCH_LOGS": "dynamo",
        "TORCHINDUCTOR_X": "1",
    }
    private = ("DATABASE_URL", "DATADOG_API_KEY", "MODELS_TOKEN", "RETRIEVER_KEY", "TORCHSERVE_TOKEN", "AWS_SECRET")
    environment = {**forwarded, **dict.fromkeys(private, "secret")}
    assert forwarded_environment(environment, [], inherits=False) == forwarded
    assert forwarded_environment(environment, ["DATABASE_URL"], inherits=False)["DATABASE_URL"] == "secret"


def test_forwarded_environment():
    environment = {"NCCL_DEBUG": "INFO", "HOME": "/root", "HF_TOKEN": "s", "X": "1"}
    assert forwarded_environment(environment, ["X", "Y=a=b"], inherits=False) == {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "s",
        "X": "1",
        "Y": "a=b",
    }
    assert forwarded_environment(environment, ["Y=2"], inherits=True) == {"Y": "2"}
    with raises("launch.variable-not-set", "--env Z=VALUE"):
        forwarded_environment(environment, ["Z"], inherits=False)
