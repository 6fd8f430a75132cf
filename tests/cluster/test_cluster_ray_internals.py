"""Private names of Ray: all exist in the pinned version, and a version without them runs as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cluster import ray_internals

PINS = Path(__file__).parents[2] / "megarl" / "pins"
OTHER_VERSION = """
from megarl.cluster import ray_internals
from megarl.cluster.session import RaySession
ray_internals.NAMES.clear()
import ray
with RaySession(num_cpus=1):
    print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote(), timeout=300))
"""


def test_tested_version_is_the_pinned_one():
    """After an upgrade of Ray, check the functions of the file, then change ``TESTED``."""
    for stack in ("default", "sglang"):
        (version,) = re.findall(r"^ray==([\d.]+)", (PINS / f"{stack}.txt").read_text(encoding="utf-8"), re.MULTILINE)
        assert version == ray_internals.TESTED
    assert all(map(ray_internals.find, ray_internals.NAMES))


@pytest.mark.parametrize("mode", ["disabled", None])
def test_version_of_ray_without_the_names_runs_as_it_is(mode, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    if mode is not None:
        environment["RAY_AUTH_MODE"] = mode
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "answer 42\n", done.stderr
    assert "listens on all interfaces" in done.stderr
