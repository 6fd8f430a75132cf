"""Checks of the order of time limits: a silent replica, the watchdog's report, a failed collective, Ray's limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeGuard

from megarl.base.timeouts import RAY_SILENCE_S, REPORT_S
from megarl.config.problems import Problem
from megarl.config.schema.jobs import EvaluateConfig, GenerateConfig, JobConfig, TrainConfig
from megarl.config.schema.run import PHASES, CollectivesConfig

_WATCHDOG = "trainer.watchdog"
_HEALTH = "actor_rollout_ref.rollout.health.timeout_s"
_GENERATING = ("gen", "testing")
_COLLECTIVE = (
    *("old_log_prob", "ref", "teacher", "repr_align", "values"),
    *("update_critic", "update_actor", "update"),
    "save_checkpoint",
)
"""Phases whose ranks wait for each other, for at most ``trainer.nccl_timeout``."""


def watchdog_phases(config: JobConfig) -> Iterator[Problem]:
    """Check the names and values of the watchdog's limits by phase."""
    limits = config.trainer.watchdog.phases
    for phase, seconds in limits.items():
        if phase not in PHASES:
            text = f"there is no phase {phase!r}; there are {', '.join(PHASES)}"
            yield Problem(f"{_WATCHDOG}.phases", limits, text, code="config.watchdog-unknown-phase")
        elif seconds is not None and not (_is_number(seconds) and seconds > 0):
            text = f"{phase}: {seconds!r} must be seconds > 0, or null for no limit"
            yield Problem(f"{_WATCHDOG}.phases", limits, text, code="config.watchdog-limit")


def watchdog_before_collectives(config: JobConfig) -> Iterator[Problem]:
    """Check that the watchdog names the silent process before a collective fails, and both before Ray's limit."""
    trainer, keys = config.trainer, config.trainer.watchdog
    if not isinstance(trainer, CollectivesConfig):
        return
    nccl = trainer.nccl_timeout
    if nccl >= RAY_SILENCE_S:
        text = f"must be below {RAY_SILENCE_S} s, after which Ray calls a silent process dead"
        yield Problem("trainer.nccl_timeout", nccl, text, code="config.collective-timeout")
    if keys.timeout_s is not None and keys.timeout_s + REPORT_S > nccl:
        key = f"{_WATCHDOG}.timeout_s"
        text = _no_time_to_report(key, keys.timeout_s, nccl)
        yield Problem(key, keys.timeout_s, text, code="config.watchdog-after-collectives")
    for name in _COLLECTIVE:
        seconds = keys.phases.get(name)
        if _is_number(seconds) and seconds + REPORT_S > nccl:
            text = _no_time_to_report(f"{_WATCHDOG}.phases.{name}", seconds, nccl)
            yield Problem(f"{_WATCHDOG}.phases", keys.phases, text, code="config.watchdog-after-collectives")


def replicas_before_watchdog(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check that a silent replica is replaced before the watchdog reports, or ends, the phase."""
    keys, health = config.trainer.watchdog, config.actor_rollout_ref.rollout.health.timeout_s
    limits = {f"{_WATCHDOG}.phases.{name}": keys.phases.get(name, keys.timeout_s) for name in _GENERATING}
    late = {path: seconds for path, seconds in limits.items() if _is_number(seconds) and seconds <= health}
    if late:
        path, seconds = min(late.items(), key=lambda item: item[1])
        path = path if path.rpartition(".")[2] in keys.phases else f"{_WATCHDOG}.timeout_s"
        text = (
            f"must be below {path}={seconds:g}, so that a silent replica is replaced before the phase counts as "
            f"stalled: set {_HEALTH}={0.75 * seconds:g}, or {path}={math.ceil(health / 0.75)}"
        )
        yield Problem(_HEALTH, health, text, code="config.replica-after-watchdog")


def sync_before_watchdog(config: TrainConfig) -> Iterator[Problem]:
    """Check that a weight sync replaces a silent replica before the watchdog ends the run."""
    keys, sync = config.trainer.watchdog, config.sync.timeout_s
    seconds = keys.phases.get("update_weights")
    if keys.action == "end" and _is_number(seconds) and seconds <= sync:
        text = (
            f"must be below {_WATCHDOG}.phases.update_weights={seconds:g}, so that a silent replica is replaced before "
            f"the run ends: set sync.timeout_s={0.75 * seconds:g}, or {_WATCHDOG}.phases.update_weights="
            f"{math.ceil(sync / 0.75)}"
        )
        yield Problem("sync.timeout_s", sync, text, code="sync.timeout-after-watchdog")


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_time_to_report(key: str, seconds: float, nccl_timeout: int) -> str:
    largest = nccl_timeout - REPORT_S
    return (
        f"{seconds:g} s leave less than {REPORT_S:g} s for the report before trainer.nccl_timeout={nccl_timeout} ends "
        f"the workers: {f'set {key} to {largest:g} or less, or ' if largest > 0 else ''}"
        f"set trainer.nccl_timeout={math.ceil(seconds + REPORT_S)}"
    )
