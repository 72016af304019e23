"""Protect a server on the loopback address against pages of other sites that a browser on the same machine may show.

- DNS rebinding: if evil.example is resolved to 127.0.0.1, a page of evil.example sends requests with the header Host: evil.example. The
  server answers only requests whose Host is a name of the loopback address.
- Requests from pages of other sites have the name of the site in the header Origin, or have the header Sec-Fetch-Site: cross-site. The
  server refuses requests from pages of other sites, unless a user follows a link to a page of the server.
- Headers of the server's responses tell the browser to load scripts, styles and data only from this server, not to guess media types, and
  not to show the page in a frame.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the responses. The policy allows inline styles and blob images, which plotly needs, but not eval."""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """ASGI middleware that refuses requests from pages of other sites (except links) and all requests but GET and HEAD.

    The middleware also adds protective headers to all responses.

    Args: port: port that the Host header must name, or 0 if any port is allowed.
    """

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        self.app, self.port = app, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        reason = self._refusal(scope)
        answer = self.app if reason is None else PlainTextResponse(f"{reason[1]}\n", reason[0])
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the HTTP status and the message with which a request is refused, or None if the request may be answered."""
        if scope["type"] != "http":
            return 403, "only HTTP is answered"
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return 403, "the host of the request is not this machine; open the address that slm-lab view printed"
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return 403, "the request comes from another site"
        followed = headers.get("sec-fetch-mode") == "navigate" and not scope["path"].startswith("/api/")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not followed:
            return 403, "the request comes from another site"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "nothing can be changed here: only GET and HEAD are answered"
        return None

    def _is_own(self, host: str) -> bool:
        name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        name, port = (name, port) if colon else (host, "80")
        return name.lower() in HOSTS and (not self.port or port == str(self.port))
