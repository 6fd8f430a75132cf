"""Jobs for schedulers: a batch script for SLURM, and a RayJob manifest for KubeRay."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.base.errors import ConfigError, ResourceError
from megarl.ops.launch.settings import JobToRun, Ports

_SLURM_WARNING_S = 120  # time between SLURM's SIGTERM and the time limit
_NAME_LENGTH = 40  # KubeRay appends to the name, and Kubernetes allows 63 characters


def batch_script(job: JobToRun, launcher: Sequence[str], folder: str, options: Sequence[str]) -> str:
    """Write a batch script that runs the launcher inside its allocation.

    Args:
        job: the job, with its number of nodes and GPUs.
        launcher: command line of the launcher.
        folder: working directory.
        options: further options of sbatch, such as ``--time=2-0``; they override the defaults.
    """
    directives = {
        "--job-name": job.name,
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--output": f"{job.name}-%j.log",
        "--signal": f"B:TERM@{_SLURM_WARNING_S}",
    }
    if job.device != "cpu":
        directives["--gpus-per-node"] = str(job.devices)
    overridden = {option.split("=")[0] for option in options}
    lines = [f"#SBATCH {name}={value}" for name, value in directives.items() if name not in overridden]
    # Whole nodes; the allocation survives a failed node, since the launcher decides about a restart.
    lines += ["#SBATCH --exclusive", "#SBATCH --no-kill", *(f"#SBATCH {option}" for option in options)]
    # With exec no shell delays signals until its foreground command ends.
    return "\n".join(["#!/bin/bash", *lines, f"cd {shlex.quote(folder)}", f"exec {shlex.join(launcher)}", ""])


def submit_batch(script: str) -> str:
    """Submit a batch script; returns sbatch's output, the job ID.

    Raises:
        ResourceError: sbatch refuses the script.
    """
    try:
        process = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=True)
    except OSError as error:
        raise ResourceError(f"sbatch cannot be started: {error}", code="launch.no-sbatch") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(
            f"sbatch refused the script: {error.stderr.strip()}", code="launch.sbatch-refused"
        ) from error
    return process.stdout.strip()


@dataclass(frozen=True)
class PodSettings:
    """Settings of all pods.

    Attributes:
        image: container image with megarl and ``ray[default]``.
        namespace: namespace of all objects; empty = the current one.
        gpu_resource: name of the GPU resource in the cluster.
        cpus: CPUs per pod; None = no request.
        memory: memory per pod, such as ``900Gi``; empty = no request.
        shared_memory: size limit of ``/dev/shm``, which holds Ray's objects.
        volumes: path in the pod by name of the persistent volume claim.
        secrets: secrets whose entries become environment variables.
        env: environment variables.
        node_selector: required labels of the machines.
        folder: working directory; empty = the image's.
    """

    image: str
    namespace: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: int | None = None
    memory: str = ""
    shared_memory: str = "64Gi"
    volumes: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


def ray_job(job: JobToRun, pods: PodSettings, ports: Ports, max_restarts: int, ray_version: str) -> dict[str, Any]:
    """Build the RayJob manifest (``ray.io/v1``); KubeRay creates and removes the cluster.

    The head's pod has devices like all others: it is one of the job's nodes. Each restart uses a new cluster.

    Args:
        job: job to run.
        pods: settings of all pods.
        ports: ports of the cluster.
        max_restarts: attempts after the first.
        ray_version: version of Ray in the image.
    """
    head = {
        # KubeRay polls the job over the dashboard, so it cannot listen on loopback; the token protects it.
        "rayStartParams": {"dashboard-host": "0.0.0.0", "port": str(ports.gcs)},  # noqa: S104
        "template": _template("ray-head", job, pods),
    }
    cluster: dict[str, Any] = {
        "rayVersion": ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": head,
    }
    workers = job.nodes - 1
    if workers:
        group = {"groupName": "nodes", "replicas": workers, "minReplicas": workers, "maxReplicas": workers}
        cluster["workerGroupSpecs"] = [
            {**group, "rayStartParams": _num_cpus(job), "template": _template("ray-worker", job, pods)}
        ]
    head["rayStartParams"] |= _num_cpus(job)
    metadata = {"name": object_name(job.name), "labels": {"app.kubernetes.io/name": "megarl"}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata | ({"namespace": pods.namespace} if pods.namespace else {}),
        "spec": {
            "entrypoint": shlex.join(job.command("python")),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": max_restarts,
            "rayClusterSpec": cluster,
        },
    }


def object_name(text: str) -> str:
    """Convert a text to a valid name of a Kubernetes object.

    Raises:
        ConfigError: the text has no letter or digit.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    if not name:
        raise ConfigError(
            f"trainer.experiment_name={text!r} has no letter or digit for the name of a RayJob",
            code="launch.rayjob-name",
        )
    return name


def apply_manifest(manifest: str) -> str:
    """Submit a manifest by ``kubectl apply``; returns kubectl's output.

    Raises:
        ResourceError: kubectl refuses the manifest.
    """
    try:
        process = subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=manifest, capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise ResourceError(f"kubectl cannot be started: {error}", code="launch.no-kubectl") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(
            f"kubectl refused the manifest: {error.stderr.strip()}", code="launch.kubectl-refused"
        ) from error
    return process.stdout.strip()


def _num_cpus(job: JobToRun) -> dict[str, str]:
    """Return Ray's CPU count for CPU jobs; KubeRay takes the GPU count from the pod's limits."""
    return {"num-cpus": str(job.devices)} if job.device == "cpu" else {}


def _template(name: str, job: JobToRun, pods: PodSettings) -> dict[str, Any]:
    limits: dict[str, str] = {} if job.device == "cpu" else {pods.gpu_resource: str(job.devices)}
    limits |= {"cpu": str(pods.cpus)} if pods.cpus else {}
    limits |= {"memory": pods.memory} if pods.memory else {}
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}}
    claims = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in pods.volumes]
    mounts = [{"name": claim, "mountPath": path} for claim, path in pods.volumes.items()]
    container: dict[str, Any] = {
        "name": name,
        "image": pods.image,
        "resources": {"limits": limits, "requests": dict(limits)},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, *mounts],
    }
    if pods.env:
        container["env"] = [{"name": key, "value": value} for key, value in pods.env.items()]
    if pods.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in pods.secrets]
    if pods.folder:
        container["workingDir"] = pods.folder
    spec: dict[str, Any] = {"containers": [container], "volumes": [shared, *claims]}
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    return {"spec": spec}
