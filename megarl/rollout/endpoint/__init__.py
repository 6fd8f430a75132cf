"""The current policy over OpenAI's chat interface, while it is trained.

Programs that lead a conversation of the run generate in a ``session``, which keeps their turns as tokens, with
log-probs, and makes a trajectory of them; anybody else's requests are answered by ``outside`` while the run generates.
``request``, ``translation`` and ``answer`` lead from JSON to tokens and back, ``server`` is HTTP, ``access`` the
token, ``endpoint`` what the driver holds, ``build`` makes it of a configuration.
"""

from megarl.rollout.endpoint.build import build_endpoint
from megarl.rollout.endpoint.endpoint import Address, Endpoint, SessionAccess
from megarl.rollout.endpoint.errors import ApiError
from megarl.rollout.endpoint.outside import OutsideLimits
from megarl.rollout.endpoint.session import Session
from megarl.rollout.endpoint.translation import ChatFormat

__all__ = [
    "Address",
    "ApiError",
    "ChatFormat",
    "Endpoint",
    "OutsideLimits",
    "Session",
    "SessionAccess",
    "build_endpoint",
]
