"""Private modules of Ray: used with the tested version only; another version runs as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from megarl.cluster import ray_internals

PINS = Path(__file__).parents[2] / "megarl" / "pins"
OTHER_VERSION = """
import logging
from megarl.cluster import RaySession, ray_internals
ray_internals.TESTED = "0.0.1"
logging.basicConfig(level="INFO")
import ray
with RaySession(num_cpus=1):
    print("address", ray.util.get_node_ip_address() == "127.0.0.1")
    print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote(), timeout=300))
"""


def test_tested_version_is_the_pinned_one() -> None:
    """After an upgrade of Ray, check the functions of the file, then change ``TESTED``."""
    for stack in ("default", "sglang"):
        (version,) = re.findall(r"^ray==([\d.]+)", (PINS / f"{stack}.txt").read_text(encoding="utf-8"), re.MULTILINE)
        assert version == ray_internals.TESTED


def test_another_version_of_ray_runs_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION], capture_output=True, text=True, timeout=600, check=True
    )
    assert "answer 42" in done.stdout
    assert "listens on all interfaces" in done.stderr
