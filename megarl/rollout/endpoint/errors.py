"""What goes wrong with a request, in the form that clients of OpenAI's interface know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is not answered; the client is told why.

    Attributes:
        status: of HTTP.
        message: for people.
        code: for programs, such as ``context_length_exceeded``.
        param: the field of the request that is at fault.
        retry_after_s: when to ask again; None = not at all.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """What stands in the answer's head."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
