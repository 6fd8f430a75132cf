"""``megarl scale``: change the number of elastic rollout replicas of a run in progress."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.base.atomic_write import atomic_write_text
from megarl.base.commands import exit_code
from megarl.base.errors import ConfigError
from megarl.base.folder_lock import read_holder
from megarl.base.formatting import count_noun
from megarl.ops.report.run_files import NoRunError, read_run
from megarl.samples.rollout_group import REPLICAS_FILE
from megarl.trainer.jobs.output_folders import LOCK_FILE


def scale_run(folder: Path, replicas: int) -> Path:
    """Request a number of rollout replicas, and return the file with it; the run follows at its weight syncs.

    Raises:
        NoRunError: the folder has no run.
        ConfigError: the run has ended, its replicas are not elastic, or it cannot have this number.
    """
    least, most = _bounds(folder, read_run(folder).config)
    if not least <= replicas <= most:
        raise ConfigError(
            f"{folder}: {replicas} replicas, expected {least} (rollout.min_replicas) to {most} (rollout.replicas)",
            code="rollout.replica-count",
        )
    holder = read_holder(folder / LOCK_FILE)
    if holder is None or (holder.shares_process_ids() and holder.is_dead()):
        raise ConfigError(f"{folder}: the run has ended", code="rollout.run-ended")
    path = folder / REPLICAS_FILE
    atomic_write_text(path, f"{replicas}\n")
    return path


def main(argv: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if the run cannot have this number of replicas."""
    parser = argparse.ArgumentParser(
        prog="megarl scale",
        description="Change the number of rollout replicas of a run with rollout.min_replicas. Replicas leave, or "
        "start and join, at the run's next weight syncs; the devices of those that leave are free for other jobs.",
    )
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("replicas", type=int, help="number of replicas")
    options = parser.parse_args(argv)

    def scale() -> int:
        path = scale_run(options.folder, options.replicas)
        print(f"{path}: {count_noun(options.replicas, 'replica')} from the next weight sync on")
        return 0

    return exit_code(scale, bad_input=(NoRunError, ConfigError, OSError))


def _bounds(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    rollout = config.get("actor_rollout_ref", {}).get("rollout", {})
    least = rollout.get("min_replicas")
    if least is None:
        raise ConfigError(
            f"{folder}: the run's replicas are not elastic; start it with rollout.min_replicas",
            code="rollout.not-elastic",
        )
    return int(least), int(rollout["replicas"])
