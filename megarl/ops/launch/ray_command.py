"""Ray's command line without its commands for Ray Serve and Ray Jobs, whose imports take seconds of each node's start.

As a program (``python -m megarl.ops.launch.ray_command start ...``) an agent runs it on its node. Ray itself goes on
without them if they cannot be imported.
"""

from __future__ import annotations

import runpy
import sys

HIDDEN = ("ray.serve", "ray.dashboard.modules.job.cli")
"""Packages that ``ray start`` imports and does not use."""


def main() -> None:
    """Run Ray's command line with the arguments of this process."""
    for name in HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
