"""Who may ask the server for what: the page itself, in a browser on this machine, for what it is made of.

A browser lets any page send requests to 127.0.0.1; this is where they end, before anything of them is read.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = frozenset({"127.0.0.1", "localhost"})
"""The names of this machine that a request may be for; any other name was made to point here by another site."""
PAGE = "/"
# What the page is made of, and its questions. No part of a path begins with a dot, so none leads out of a folder.
_SERVED = {
    "GET": re.compile(r"/|/theme\.css|/favicon\.ico|/(?:assets|static)(?:/[\w-][\w.-]*)+", re.ASCII),
    "HEAD": re.compile(PAGE),
    "POST": re.compile(r"/ask/[a-z]+"),
}
# What the application is told of a request. It takes no options from an address, has no sessions, and behind no proxy
# its own rules for other origins have nothing to go by.
_PASSED_ON = frozenset(
    {b"host", b"accept", b"accept-encoding", b"content-type", b"content-length", b"transfer-encoding"}
    | {b"if-none-match", b"if-modified-since"}
)
# What the browser may load and whom it may talk to: this server. Gradio's own scripts need the two "unsafe".
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; base-uri 'self'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'"
)
_ADDED = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


class Guard:
    """A web application that other sites, and other names for this machine, do not reach.

    A request is answered if it is for 127.0.0.1 or localhost, for something that the page is made of, and of the page
    itself: not of another origin (``Origin``, ``Sec-Fetch-Site``; another port of this machine is another origin). A
    link on another site may open the page. What names no origin, such as curl, is answered too.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page opens no web socket
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _ADDED.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            # what breaks HTTP while it is answered gets no answer, and leaves no traceback in the terminal
            with contextlib.suppress(Exception):
                await send(message)

        refused = refusal(scope)
        if refused is not None:
            from starlette.responses import PlainTextResponse

            status, sentence = refused
            await PlainTextResponse(f"{sentence}\n", status)(scope, receive, send_with_policy)
        else:
            headers = [(name, value) for name, value in scope["headers"] if name in _PASSED_ON]
            await self.app({**scope, "headers": headers, "query_string": b""}, receive, send_with_policy)


def refusal(scope: Scope) -> tuple[int, str] | None:
    """Why a request is not answered: the status, and a sentence; None for one that is."""
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or hosts[0].partition(":")[0] not in NAMES:
        return 400, f"The explorer answers requests for {' and '.join(sorted(NAMES))} only."
    served = _SERVED.get(scope["method"])
    if served is None or not served.fullmatch(scope["path"]):
        return 404, "The explorer has nothing at this address."
    if _is_foreign(scope, hosts[0]):
        return 403, "The explorer answers its own page only, not those of other sites."
    return None


def _is_foreign(scope: Scope, host: str) -> bool:
    """Whether a request is of another site's page."""
    if any(origin != f"http://{host}" for origin in _values(scope, b"origin")):
        return True
    if all(site in ("same-origin", "none") for site in _values(scope, b"sec-fetch-site")):  # none: typed, or a bookmark
        return False
    opens = _values(scope, b"sec-fetch-mode") == ["navigate"] and _values(scope, b"sec-fetch-dest") == ["document"]
    return not (opens and scope["method"] == "GET" and scope["path"] == PAGE)


def _values(scope: Scope, wanted: bytes) -> list[str]:
    """The values of a header, in lower case."""
    return [value.decode("latin-1").lower() for name, value in scope["headers"] if name == wanted]
