"""Checks of a run's optional packages and logins: the rollout engine and the trackers, by the preflight of a run."""

from __future__ import annotations

from megarl.base.errors import ConfigError
from megarl.base.packages import require_sglang
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status
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
