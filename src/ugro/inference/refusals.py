"""Why a request is refused, as OpenAI's clients expect it: a status, a sentence, and the parameter it is about."""

from __future__ import annotations

from typing import Any

RETRY_LATER_S = 1


class Refused(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, param=self.param, code=self.code)

    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> Refused:
    return Refused(400, message, param=param, code=code)


def too_long(prompt: int, wanted: int, context: int) -> Refused:
    text = f"the model's context has {context} tokens; the prompt has {prompt}"
    more = f" and {wanted} new ones are asked for" if prompt < context else ""
    return bad(f"{text}{more}", code="context_length_exceeded")


def queue_full(waiting: int, retry_s: int) -> Refused:
    return Refused(429, f"{waiting} requests wait already; try again later", code="queue_full", retry_s=retry_s)


def not_ready(reason: str) -> Refused:
    return Refused(503, reason, code="not_ready", retry_s=RETRY_LATER_S)


def model_failed(reason: str) -> Refused:
    return Refused(500, f"the model failed: {reason}", code="model_failed")


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
