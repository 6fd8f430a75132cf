"""Manifests, against the fields of KubeRay's own definition of a RayJob."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from megarl.errors import ConfigError
from megarl.launch import command
from megarl.launch.kubernetes import PodSettings, object_name, ray_job
from megarl.launch.settings import JobToRun, Ports

JOB = JobToRun(("train", "--config-name", "grpo", "data.train_files=[/d/a b.parquet]"), True, "My_Run", 4, "cuda", 8)
SCHEMA = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text())


def test_manifest_has_fields_that_kuberay_has():
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


def test_schema_refuses_a_field_that_kuberay_has_not():
    manifest = ray_job(JOB, PodSettings("x"), Ports(), 0, "2.60.0")
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["replicas"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        jsonschema.validate(manifest, SCHEMA)


def test_one_node_is_the_head_alone():
    job = JobToRun(("python", "x.py"), False, "x", 1, "cpu", 2)
    cluster = ray_job(job, PodSettings("x"), Ports(), 0, "2.60.0")["spec"]["rayClusterSpec"]
    assert "workerGroupSpecs" not in cluster
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "2"


def test_names_that_kubernetes_takes():
    assert object_name("Exp/lr=1e-6 " + "x" * 80) == "exp-lr-1e-6-" + "x" * 28
    with pytest.raises(ConfigError, match="experiment_name"):
        object_name("___")


def test_printed_and_submitted(stand_ins, monkeypatch, capsys):
    for name, value in stand_ins.environment().items():
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
    assert "&id" not in printed, "an anchor is valid YAML, and hard to edit"
    assert command.main(["--submit", *words]) == 0
    (call,) = stand_ins.calls("kubectl")
    assert call["arguments"] == ["apply", "-f", "-"] and call["input"] == printed
    assert command.main([word for word in words if word != "--image=i"]) == 2
    assert "needs --image" in capsys.readouterr().err
