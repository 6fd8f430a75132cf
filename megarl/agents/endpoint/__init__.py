"""The chat endpoint: OpenAI-compatible access to the policy during training.

External agents generate in a ``session``, which records their turns as tokens with log-probs and returns a trajectory.
Other clients are served by ``external_requests`` while the run generates. ``request`` parses requests, ``chat_format``
converts between messages, tokens and response bodies, ``server`` is the HTTP server, ``endpoint`` opens and closes it.
"""

from megarl.agents.endpoint.chat_format import ChatFormat
from megarl.agents.endpoint.endpoint import Endpoint, EndpointAddress, build_endpoint, check_endpoint
from megarl.agents.endpoint.external_requests import ExternalRequestLimits
from megarl.agents.endpoint.request import ApiError
from megarl.agents.endpoint.session import Session

__all__ = [
    "ApiError",
    "ChatFormat",
    "Endpoint",
    "EndpointAddress",
    "ExternalRequestLimits",
    "Session",
    "build_endpoint",
    "check_endpoint",
]
