import pytest

from megarl.errors import ConfigError
from megarl.launch.reach import by_srun, by_ssh, forwarded, local_hosts, parse_hosts, slurm_hosts


def test_ssh_runs_the_agent_in_the_folder_without_a_password():
    argv = by_ssh("/env/bin/python", "/work dir", ["ssh", "-p", "22"], ["apptainer", "exec", "i.sif"])("gpu1")
    assert argv[:3] == ["ssh", "-p", "22"] and argv[-2] == "gpu1"
    assert argv[-1] == "cd '/work dir' && exec apptainer exec i.sif /env/bin/python -m megarl.launch.agent"
    assert "BatchMode=yes" in argv


def test_srun_takes_one_node_with_all_of_its_cpus():
    argv = by_srun("python", "/w", ["srun", "--mem=0"], [], {"SLURM_CPUS_ON_NODE": "96"})("n1")
    assert argv[:2] == ["srun", "--mem=0"]
    assert {"--nodelist=n1", "--ntasks=1", "--overlap", "--cpus-per-task=96", "--chdir=/w"} <= set(argv)
    assert argv[-3:] == ["python", "-m", "megarl.launch.agent"]


def test_hosts_of_a_list_and_of_a_file(tmp_path):
    assert parse_hosts("a,b, c") == ["a", "b", "c"]
    file = tmp_path / "hosts.txt"
    file.write_text("# the head\nnode1 slots=8\n\nnode2  # the other\n")
    assert parse_hosts(str(file)) == ["node1", "node2"]


@pytest.mark.parametrize(
    ("text", "what"), [(" , ", "names no host"), ("a,b,a", "names a more than once"), ("-oX", "is no host")]
)
def test_hosts_that_are_none(text, what):
    with pytest.raises(ConfigError, match=what):
        parse_hosts(text)


def test_nodes_on_this_machine():
    assert local_hosts(1) == ["127.0.0.1"]
    assert local_hosts(3) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


def test_hosts_of_an_allocation(stand_ins, monkeypatch):
    for name, value in stand_ins.environment().items():
        monkeypatch.setenv(name, value)
    assert slurm_hosts({"SLURM_JOB_NODELIST": "local[2-3]"}) == ["127.0.0.2", "127.0.0.3"]
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        slurm_hosts({})


def test_variables_that_nodes_get():
    here = {"NCCL_DEBUG": "INFO", "HOME": "/root", "HF_TOKEN": "s", "X": "1"}
    assert forwarded(here, ["X", "Y=a=b"], all_of_them=False) == {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "s",
        "X": "1",
        "Y": "a=b",
    }
    assert forwarded(here, ["Y=2"], all_of_them=True) == {"Y": "2"}
    with pytest.raises(ConfigError, match="--env Z"):
        forwarded(here, ["Z"], all_of_them=False)
