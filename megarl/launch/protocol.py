"""What launcher and agent say to each other: one JSON object per line, requests in, events out.

Nothing secret is ever on a command line, which every user of a machine can read: token and environment travel here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

RAY = "ray"
"""Name of the command that is a node's Ray."""


@dataclass(frozen=True)
class Run:
    """Asks for a command to be started.

    Attributes:
        name: what its events are called; ``ray`` is the node's Ray.
        argv: the command.
        env: variables that differ from the agent's own.
        ports: of ``address``, which must be free before the command starts.
        address: of this node, for ``ports`` and ``answers``.
        answers: port on which the command will listen; :data:`UP` follows when it does. None = it is not waited for.
    """

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    address: str = ""
    answers: int | None = None


@dataclass(frozen=True)
class Signal:
    """Asks for a signal to be sent to a command that was started."""

    name: str
    number: int


@dataclass(frozen=True)
class Token:
    """The cluster's token, before anything is run."""

    token: str


@dataclass(frozen=True)
class Ping:
    """The launcher is there."""


@dataclass(frozen=True)
class Stop:
    """Asks the agent to end everything it started, and itself.

    Attributes:
        keep_logs: folder on the node to which Ray's logs go first; empty = they are thrown away.
    """

    keep_logs: str = ""


Request = Run | Signal | Token | Ping | Stop
_REQUESTS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Run, Signal, Token, Ping, Stop)}

HELLO, UP, OUTPUT, ENDED, REFUSED, LOGS, GONE = "hello", "up", "output", "ended", "refused", "logs", "gone"
"""Events: the agent runs (``addresses`` by interface, ``address``); a command listens; it wrote (``stream``, ``text``);
it ended (``code``); a request cannot be done (``why``); logs were kept (``folder``); the agent is no more (``code``,
``why``), which the launcher says."""


@dataclass(frozen=True)
class Event:
    """Something that happened on a node.

    Attributes:
        kind: one of the names above.
        host: the node; filled in by the launcher.
        name: the command it is about, or empty.
        facts: the rest.
    """

    kind: str
    host: str = ""
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def encode_request(request: Request) -> str:
    """One line, with its end."""
    return json.dumps({"do": type(request).__name__, **asdict(request)}) + "\n"


def decode_request(line: str) -> Request:
    """The request of a line.

    Raises:
        ValueError: it is none, as when the launcher is of another version.
    """
    try:
        values = json.loads(line)
        request: Request = _REQUESTS[values.pop("do")](**values)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a request: {line.strip()[:200]!r} ({error})") from error
    return request


_MARK = "megarl-event "


def encode_event(kind: str, name: str = "", **facts: Any) -> str:
    """One line, with its end, that :func:`decode_event` knows among what shells and schedulers print."""
    return _MARK + json.dumps({"kind": kind, "name": name, "facts": facts}) + "\n"


def decode_event(line: str, host: str) -> Event | None:
    """The event of a line; None for one that somebody else wrote."""
    if not line.startswith(_MARK):
        return None
    try:
        return Event(host=host, **json.loads(line.removeprefix(_MARK)))
    except (json.JSONDecodeError, TypeError):
        return None
