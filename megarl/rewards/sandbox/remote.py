"""The remote sandbox: a client of SandboxFusion's ``/run_code``, as used by verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.http import post_json
from megarl.rewards.sandbox.local import FINISHED, TIMEOUT, Execution

_SERVICE_S = 10.0
"""Seconds for the service itself, beyond the limits of the program."""


class RemoteSandbox:
    """Runs programs through ``POST /run_code``.

    Args:
        timeout_s: seconds for the compilation, and for the run.
        memory_mb: memory of the program, in MiB.
    """

    def __init__(self, url: str, timeout_s: float = 10.0, memory_mb: int = 1024) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb

    async def run(self, source: str, stdin: str = "") -> Execution:
        """Run a program.

        Raises:
            InfrastructureFailure: the service is unreachable or failed.
            ValueError: the service refuses the program.
        """
        body = {
            "code": source,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": self.timeout_s,
            "run_timeout": self.timeout_s,
            "memory_limit_MB": self.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        response = await post_json(self.url, body, 2 * self.timeout_s + _SERVICE_S)
        status = response.get("status") if isinstance(response, Mapping) else None
        if status not in ("Success", "Failed"):
            raise InfrastructureFailure(f"{self.url}: the sandbox failed: {response!r:.300}")
        for stage in ("compile_result", "run_result"):
            result = response.get(stage)
            if isinstance(result, Mapping) and (stage == "run_result" or _failed(result)):
                return _execution(result)
        raise InfrastructureFailure(f"{self.url}: the answer has no result of a run: {response!r:.300}")


def _failed(result: Mapping[str, Any]) -> bool:
    return result.get("status") != "Finished" or result.get("return_code") not in (0, None)


def _execution(result: Mapping[str, Any]) -> Execution:
    stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    if result.get("status") == "TimeLimitExceeded":
        return Execution(TIMEOUT, None, stdout, stderr)
    code = result.get("return_code")
    succeeded = result.get("status") == "Finished"
    return Execution(FINISHED, code if isinstance(code, int) else 0 if succeeded else 1, stdout, stderr)
