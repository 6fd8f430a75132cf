"""Messages between launcher and agents: one JSON object per line, requests to an agent, events from it.

Secrets are never on a command line, which every user of a machine can read: token and environment travel in requests.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from megarl.base.json_text import parse_json

RAY = "ray"  # name of the command that runs a node's Ray


@dataclass(frozen=True)
class StartCommand:
    """Request: start a command."""

    name: str  # name of the command in its events; ray is the node's Ray
    argv: list[str]  # command line
    env: dict[str, str] = field(default_factory=dict)  # variables added to the agent's environment
    ports: list[int] = field(default_factory=list)  # ports of address that must be free before the start
    address: str = ""  # address of this node, for ports and listen_port
    listen_port: int | None = None  # LISTENING is sent once it accepts connections; None = never


@dataclass(frozen=True)
class SendSignal:
    """Request: send a signal to a started command."""

    name: str
    number: int


@dataclass(frozen=True)
class SetToken:
    """Request: store the cluster's token; sent before any command."""

    token: str


@dataclass(frozen=True)
class Heartbeat:
    """Request without an action: the launcher is alive."""


@dataclass(frozen=True)
class Shutdown:
    """Request: end all commands, then the agent."""

    keep_logs: str = ""  # folder on the node to copy Ray's logs to; empty = discard them


AgentRequest = StartCommand | SendSignal | SetToken | Heartbeat | Shutdown
_REQUESTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (StartCommand, SendSignal, SetToken, Heartbeat, Shutdown)
}

AGENT_STARTED = "agent_started"  # event: the agent runs; `addresses` by interface, `address`
LISTENING = "listening"  # event: a command accepts connections on its port
OUTPUT = "output"  # event: output of a command; `stream`, `text`
COMMAND_ENDED = "command_ended"  # event: a command ended; `code`
PORTS_TAKEN = "ports_taken"  # event: a command was not started, since another process has its ports; `reason`
REQUEST_FAILED = "request_failed"  # event: a request failed; `reason`
STEP_CANCELLED = "step_cancelled"  # event: SLURM ends the job step in which the agent runs; `job`
LOGS_KEPT = "logs_kept"  # event: Ray's logs were copied; `folder`
DISCONNECTED = "disconnected"  # event of the launcher itself: the connection to the agent ended; `code`, `reason`


@dataclass(frozen=True)
class AgentEvent:
    """Event on a node."""

    kind: str  # one of the constants of this module
    host: str = ""  # name of the node, added by the launcher
    name: str = ""  # name of the command, or empty
    facts: dict[str, Any] = field(default_factory=dict)  # further values by name


def encode_request(request: AgentRequest) -> str:
    """Encode a request as one line."""
    return json.dumps({"do": type(request).__name__, **asdict(request)}) + "\n"


def decode_request(line: str) -> AgentRequest:
    """Decode the request of a line.

    Raises:
        ValueError: the line is not a request, for example from another version of the launcher.
    """
    try:
        values = parse_json(line)
        request: AgentRequest = _REQUESTS[values.pop("do")](**values)
        _check_types(request)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a request: {line.strip()[:200]!r} ({error})") from error
    return request


def _check_types(message: AgentRequest | AgentEvent) -> None:
    """Check a message from JSON.

    Raises:
        ValueError: a field has another type than declared.
    """
    for name, kind in get_type_hints(type(message)).items():
        if not _has_type(value := getattr(message, name), kind):
            raise ValueError(f"{name} is {value!r:.100}")


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has a type: a class, a union, or a list or mapping of types."""
    outer, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if outer in (list, dict):
        parts = [value] if outer is list else [value, value.values()] if isinstance(value, dict) else []
        return isinstance(value, outer) and all(_has_type(x, t) for p, t in zip(parts, inner, strict=True) for x in p)
    if inner:
        return any(_has_type(value, part) for part in inner)
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


_MARK = "megarl-event "


def encode_event(kind: str, name: str = "", **facts: Any) -> str:
    """Encode an event as one line with a mark; shells and schedulers print other lines on the same stream."""
    return _MARK + json.dumps({"kind": kind, "name": name, "facts": facts}) + "\n"


def decode_event(line: str, host: str) -> AgentEvent | None:
    """Decode the event of a line; None if the line is other output."""
    if not line.startswith(_MARK):
        return None
    try:
        event = AgentEvent(host=host, **parse_json(line.removeprefix(_MARK)))
        _check_types(event)
    except (ValueError, TypeError):
        return None
    return event
