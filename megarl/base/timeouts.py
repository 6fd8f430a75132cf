"""Order of the time limits that find a process without progress: recovery, report, end of the collective, end by Ray.

The smallest limit acts first: ``rollout.health.timeout_s`` moves the requests of a frozen replica, ``trainer.watchdog``
names the frozen process, ``trainer.nccl_timeout`` ends a collective, and Ray declares a silent process dead. The
checks of the configuration (:mod:`megarl.config.checks.run`) keep this order.
"""

from __future__ import annotations

REPORT_S = 60.0
"""Seconds between the limit of a phase and later limits, in which the watchdog collects the stacks of all nodes."""

RAY_SILENCE_S = 86_400
"""Seconds after which Ray declares a silent process dead, in clusters that megarl starts.

Ray's default is 420: after 300 seconds (``grpc_client_keepalive_time_ms``) it asks the process, and waits 120 seconds
for the response. A node that fails is found within a minute by other means.
"""
RAY_SILENCE = {"grpc_client_keepalive_time_ms": 1000 * RAY_SILENCE_S}
"""Ray's setting for :data:`RAY_SILENCE_S`, by name; the environment variable has the prefix ``RAY_``."""
