"""A RayJob for KubeRay that runs a job on a cluster of its own, and takes the cluster down after it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.errors import ConfigError, ResourceError
from megarl.launch.settings import JobToRun, Ports

_NAME_LENGTH = 40  # KubeRay adds to it, and a name in Kubernetes has at most 63 characters


@dataclass(frozen=True)
class PodSettings:
    """What every pod gets.

    Attributes:
        image: container image with megarl and ``ray[default]``.
        namespace: for all objects; empty = the current one.
        gpu_resource: by which name the cluster counts GPUs.
        cpus: of each pod; None = no request.
        memory: of each pod, such as ``900Gi``; empty = no request.
        shared_memory: largest size of ``/dev/shm``, where Ray keeps objects.
        volumes: path in the pod by name of the persistent volume claim.
        secrets: names of secrets whose entries become variables.
        env: variables.
        node_selector: labels that the machines must have.
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
    """The manifest, of ``ray.io/v1``.

    The head's pod has devices like all others: it is one of the job's nodes. Each restart has a new cluster.

    Args:
        job: what is run.
        pods: what every pod gets.
        ports: of the cluster.
        max_restarts: attempts after the first.
        ray_version: of Ray in the image.
    """
    head = {
        # KubeRay follows the job over the dashboard, so it cannot be on loopback here; the token guards it.
        "rayStartParams": {"dashboard-host": "0.0.0.0", "port": str(ports.gcs)},
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
            {**group, "rayStartParams": _counted(job), "template": _template("ray-worker", job, pods)}
        ]
    head["rayStartParams"] |= _counted(job)
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
    """A name that Kubernetes accepts, near to the one given.

    Raises:
        ConfigError: nothing of it is left.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    if not name:
        raise ConfigError(f"trainer.experiment_name={text!r} has no letter or digit to name a RayJob by")
    return name


def apply(manifest: str) -> str:
    """Hands a manifest to the cluster; returns what kubectl says.

    Raises:
        ResourceError: it refuses it.
    """
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=manifest, capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise ResourceError(f"kubectl cannot be started: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(f"kubectl refused the manifest: {error.stderr.strip()}") from error
    return done.stdout.strip()


def _counted(job: JobToRun) -> dict[str, str]:
    """CPU slots are said; GPUs KubeRay takes from the pod's limits."""
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
