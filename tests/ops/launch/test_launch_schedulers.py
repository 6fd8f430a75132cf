"""RayJob manifests, against KubeRay's schema."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from expected_errors import raises

from megarl.ops.launch import command
from megarl.ops.launch.schedulers import PodSettings, object_name, ray_job
from megarl.ops.launch.settings import JobToRun, Ports

JOB = JobToRun(("train", "--config-name", "grpo", "data.train_files=[/d/a b.parquet]"), True, "My_Run", 4, "cuda", 8)
SCHEMA = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text(encoding="utf-8"))


def test_manifest_matches_kuberays_schema():
    pods = PodSettings(
        "registry/megarl:1", "rl", cpus=96, memory="900Gi", volumes={"shared": "/shared"}, secrets=("wandb",)
    )
    manifest = ray_job(JOB, pods, Ports(), 3, "2.60.0")
    jsonschema.validate(manifest, SCHEMA)
    spec, cluster = manifest["spec"], manifest["spec"]["rayClusterSpec"]
    assert manifest["metadata"]["name"] == "my-run"
    assert shlex.split(spec["entrypoint"]) == ["python", "-m", "megarl.cli", *JOB.words]
    assert spec["backoffLimit"] == 3 and spec["shutdownAfterJobFinishes"]
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 3
    for part in (cluster["headGroupSpec"], group):
        (container,) = part["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8", "the head is one of the job's nodes"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared-memory": "/dev/shm", "shared": "/shared"}
        assert {volume["name"] for volume in part["template"]["spec"]["volumes"]} == set(mounts)


def test_schema_refuses_an_unknown_field():
    manifest = ray_job(JOB, PodSettings("x"), Ports(), 0, "2.60.0")
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["replicas"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        jsonschema.validate(manifest, SCHEMA)


def test_single_node_job_has_no_worker_pods():
    job = JobToRun(("python", "x.py"), False, "x", 1, "cpu", 2)
    cluster = ray_job(job, PodSettings("x"), Ports(), 0, "2.60.0")["spec"]["rayClusterSpec"]
    assert "workerGroupSpecs" not in cluster
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "2"


def test_object_names_are_valid():
    assert object_name("Exp/lr=1e-6 " + "x" * 80) == "exp-lr-1e-6-" + "x" * 28
    with raises("launch.rayjob-name", "trainer.experiment_name='___'"):
        object_name("___")


def test_manifest_is_printed_or_submitted(fake_commands, monkeypatch, capsys):
    for name, value in fake_commands.environment().items():
        monkeypatch.setenv(name, value)
    words = [
        "--on",
        "kubernetes",
        "--image=i",
        "--env=A=b",
        "--nodes=1",
        "--devices-per-node=2",
        "--",
        "python",
        "x.py",
    ]
    assert command.main(words) == 0
    printed = capsys.readouterr().out
    jsonschema.validate(yaml.safe_load(printed), SCHEMA)
    assert "&id" not in printed, "YAML anchors are hard to edit"
    assert command.main(["--submit", *words]) == 0
    (call,) = fake_commands.calls("kubectl")
    assert call["arguments"] == ["apply", "-f", "-"] and call["input"] == printed
    assert command.main([word for word in words if word != "--image=i"]) == 2
    assert capsys.readouterr().err == (
        "--on kubernetes needs --image: a container image with megarl and ray[default] [launch.no-image]\n"
    )
