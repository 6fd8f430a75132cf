"""Checks of a run's optional services: rollout engine, trackers and code sandbox."""

from __future__ import annotations

from megarl.base.errors import ConfigError
from megarl.base.packages import require_sglang
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.sandbox import protections
from megarl.tracking import check_trackers


def check_engine_package(needs: Needs) -> list[CheckResult]:
    """Check that the package of the rollout engine is installed."""
    if needs.engine != "sglang":
        return []
    try:
        require_sglang()
    except ConfigError as error:
        return [CheckResult("rollout engine", Status.FAIL, str(error), "see the message")]
    return [CheckResult("rollout engine", Status.PASS, "sglang is installed")]


def check_logins(needs: Needs) -> list[CheckResult]:
    """Check the setup of each tracker, such as its package and login, without the network."""
    results = []
    for name in needs.trackers:
        try:
            check_trackers([name])
        except ConfigError as error:
            results.append(CheckResult(f"tracker {name}", Status.FAIL, str(error), "see the message"))
        else:
            results.append(CheckResult(f"tracker {name}", Status.PASS, "ready"))
    return results


def check_sandbox(needs: Needs) -> CheckResult:
    """Check that this machine can isolate generated programs, and list the active protections of the local sandbox."""
    try:
        observed = protections()
    except InfrastructureFailure as error:
        remedy = "only for the reward function code: allow user namespaces, or set reward.sandbox.url"
        return CheckResult("code sandbox", Status.WARN, str(error), remedy)
    active = [protection.name for protection in observed if protection.active]
    missing = [f"{p.name} ({p.remedy})" if p.remedy else p.name for p in observed if not p.active]
    text = ", ".join(active) + (f"; not active: {', '.join(missing)}" if missing else "")
    if "seccomp filter" not in active:
        remedy = "only for the reward function code: see the message, or set reward.sandbox.allow_unfiltered=true"
        return CheckResult("code sandbox", Status.WARN, text, remedy)
    return CheckResult("code sandbox", Status.PASS, text)
