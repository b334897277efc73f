"""What every request passes before FastAPI: API key, draining, the limit of requests in flight."""

import hashlib
import hmac

from deepserve.server.errors import ApiError
from deepserve.server.state import ServerState

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
ADMIN_PATHS = frozenset({"/scale"})  # they change the server, and have keys of their own
GENERATE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_REQUEST_ID_BYTES = 256


class Gate:
    """Outermost ASGI application. It counts a request until its last byte is out, so that a drain can wait for it."""

    def __init__(self, app, state: ServerState):
        self._app = app
        self._state = state
        # Digests have one length, so the comparison's time says nothing about a key.
        self._keys, self._admin_keys = (
            [hashlib.sha256(key.encode()).digest() for key in keys] for keys in (state.options.api_key, state.options.admin_api_key)
        )

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if request_id := headers.get(b"x-request-id", b"")[:MAX_REQUEST_ID_BYTES]:
            send = _with_header(send, (b"x-request-id", request_id))
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            if scope["path"] not in GENERATE_PATHS or scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            self._check_room()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._state.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.leave()

    def _check_key(self, path: str, authorization: bytes):
        keys = self._keys
        if path in ADMIN_PATHS:
            keys = self._admin_keys
            if not keys:
                raise ApiError(403, f"{path} is closed: the server was started without --admin-api-key", code="admin_closed")
        if not keys or path in OPEN_PATHS:
            return
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # A list, not a generator: every key is compared whatever the others say.
        right = any([hmac.compare_digest(digest, known) for known in keys])
        if scheme.lower() != b"bearer" or not right:
            raise ApiError(401, "missing or wrong API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_room(self):
        state = self._state
        if state.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": "1"})
        if state.num_in_flight >= state.options.max_concurrent_requests:
            raise ApiError(
                429, f"{state.num_in_flight} requests are in flight, the limit", code="too_many_requests", headers={"retry-after": "1"}
            )


def _with_header(send, header: tuple[bytes, bytes]):
    async def send_with_header(message):
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return send_with_header
