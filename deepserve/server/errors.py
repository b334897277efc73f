"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} for every 4xx and 5xx."""

import re

import msgspec
from starlette.responses import Response

from deepserve.engine.request import PromptTooLong
from deepserve.server.protocol import ChatRequest, CompletionRequest, ScaleRequest

FIELDS = frozenset(ChatRequest.__struct_fields__ + CompletionRequest.__struct_fields__ + ScaleRequest.__struct_fields__)
_AT = re.compile(r"at (?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_NAME = re.compile(r"[a-z_]+\b")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """Answered to the client as it is; raise it before the response has started."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")
        # vLLM puts the status there when there is no better word; clients switch on either.
        code = self.code if self.code is not None else self.status
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, code)))

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(error: ValueError | str, param: str | None = None) -> ApiError:
    """Our own ValueErrors start with the name of the field they complain about."""
    message = str(error)
    if param is None and (name := _NAME.match(message)) and name[0] in FIELDS:
        param = name[0]
    # OpenAI's word, by which clients know to shorten what they send.
    return ApiError(400, message, param=param, code="context_length_exceeded" if isinstance(error, PromptTooLong) else None)


def undecodable(error: Exception) -> ApiError:
    """A body that is not JSON, or not of the expected shape."""
    message = str(error)
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    at = _AT.search(message)
    where = at[1] if at else ""
    unknown, missing = _UNKNOWN.search(message), _MISSING.search(message)
    if named := unknown or missing:
        where = f"{where}.{named[1]}" if where else named[1]
    if unknown:
        return ApiError(400, f"unknown field `{where}`", param=where, code="unknown_field")
    return ApiError(400, message.replace("`$.", "`"), param=where or None, code="missing_field" if missing else "invalid_type")


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"the model `{name}` does not exist", param="model", code="model_not_found")


def no_engine(message: str = "no engine can take requests now") -> ApiError:
    return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "5"})
