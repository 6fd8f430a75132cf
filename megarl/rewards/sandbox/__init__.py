"""Sandboxes for generated programs: Linux namespaces on this machine, or a SandboxFusion service."""

from megarl.rewards.sandbox.local import Execution, LocalSandbox, SandboxLimits, isolation_problem, protections
from megarl.rewards.sandbox.remote import RemoteSandbox

__all__ = ["Execution", "LocalSandbox", "RemoteSandbox", "SandboxLimits", "isolation_problem", "protections"]
