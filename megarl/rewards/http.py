"""HTTP requests of reward functions; distinguishes a failed service from a bad sample. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.json_text import parse_json
from megarl.rewards.calling import InfrastructureFailure

_SAMPLE_STATUSES = (400, 413, 422)
"""The service refuses this request, for example because it is too long; any other error status is the service's."""
_EXCERPT = 300


async def post_json(
    url: str, body: Mapping[str, Any], timeout_s: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Send one POST request and return the JSON of the response; the caller decides about retries.

    Raises:
        InfrastructureFailure: the service is unreachable, too slow, failed, or returned no JSON.
        ValueError: the service refuses this request.
    """
    return await _request("POST", url, dict(body), timeout_s, headers)


async def get_json(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
    """Send one GET request; otherwise as :func:`post_json`."""
    return await _request("GET", url, None, timeout_s, headers)


async def _request(
    method: str, url: str, body: dict[str, Any] | None, timeout_s: float, headers: Mapping[str, str] | None
) -> Any:
    import aiohttp  # a slow import, needed only by processes that call a service

    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=dict(headers or {})) as session,
            session.request(method, url, json=body) as response,
        ):
            content = await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        raise InfrastructureFailure(f"{url} did not answer within {timeout_s:g} s ({cause})") from error
    if response.status != 200:
        text = f"{url} answered with status {response.status}: {content[:_EXCERPT].decode(errors='replace')}"
        raise ValueError(text) if response.status in _SAMPLE_STATUSES else InfrastructureFailure(text)
    try:
        return parse_json(content)
    except ValueError as error:
        raise InfrastructureFailure(f"{url} answered no JSON but {content[:_EXCERPT]!r}") from error
