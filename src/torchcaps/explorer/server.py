"""Serve the page and the answers to its questions by Python's ``http.server``, to this machine only.

Browsers let the page of any site send requests to 127.0.0.1. So the server answers a request only if it names this
machine (``Host``) and was not sent by a page of another origin (``Origin``; another port of this machine is another
origin). A request without an origin, such as curl's, is answered too.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from torchcaps.errors import InputError
from torchcaps.explorer.questions import MAX_QUESTION_BYTES, Questions
from torchcaps.explorer.state import Explorer
from torchcaps.files import one_sentence

HOST, PORT = "127.0.0.1", 7860
"""Default address of the page; another port is used if this one is taken."""
MAX_ANSWERS_AT_ONCE = 2
"""Questions answered at the same time; others wait, so that a few large images do not fill the memory."""
MAX_CONNECTIONS = 64
"""Open connections; a further one is closed at once."""
MAX_CONNECTION_SECONDS = 60.0
"""Seconds after which the server stops reading from a connection."""

PAGE = Path(__file__).parent / "page"
"""The files of the page."""
ABOUT = "export const props = "
"""Beginning of ``about.js``; the facts about the networks follow, as JSON."""
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII)  # any port: an SSH tunnel may change it
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


@contextmanager
def serving(explorers: Sequence[Explorer], port: int | None = None) -> Iterator[str]:
    """Serve the page in a thread until the context ends; yield its address.

    Args:
        explorers: One network, or two to show side by side; the first supplies the test images.
        port: Port of 127.0.0.1; 0: any free port; None: 7860 or, if that is taken, any free port.

    Raises:
        InputError: The port cannot be used, or the networks take different images or classes.
    """
    questions = Questions(explorers)
    try:
        server = _Server(questions, PORT if port is None else port)
    except OSError as error:
        if port is not None:
            why = f"port {port} cannot be used: {error.strerror}"
            raise InputError(f"{why}; name another with --port, or leave it out") from None
        server = _Server(questions, 0)
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingTCPServer):
    """HTTP server with a thread for each connection, and limits on their number and time."""

    allow_reuse_address = os.name == "posix"  # reuse a port that was just released; Windows would also reuse a busy one
    request_queue_size = 128

    def __init__(self, questions: Questions, port: int) -> None:
        self.questions, self.answering = questions, threading.Semaphore(MAX_ANSWERS_AT_ONCE)
        self.page = {f"/{file.name}": (file.read_bytes(), _KINDS[file.suffix]) for file in PAGE.iterdir()}
        self.page["/"] = self.page.pop("/page.html")
        self.page["/about.js"] = f"{ABOUT}{questions.about()};".encode(), "text/javascript"
        self.opened: dict[socket.socket, float] = {}
        super().__init__((HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.opened) >= MAX_CONNECTIONS:
            return self.shutdown_request(request)
        self.opened[request] = time.monotonic()
        return super().process_request(request, client_address)

    def service_actions(self) -> None:  # called at each poll
        for connection, since in list(self.opened.items()):
            if time.monotonic() - since > MAX_CONNECTION_SECONDS:
                _shut(connection, socket.SHUT_RD)

    def shutdown_request(self, request: Any) -> None:
        self.opened.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for connection in list(self.opened):
            _shut(connection, socket.SHUT_RDWR)
        super().server_close()  # waits for threads that still compute an answer

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # no traceback if the browser has closed the connection
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answer the single request of a connection."""

    server: _Server
    timeout = 10  # seconds to wait for the next bytes
    disable_nagle_algorithm = True  # otherwise the body waits up to 40 ms for the confirmation of the head
    default_request_version = "HTTP/1.0"  # otherwise a malformed request is answered without a head

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.path = self.path.partition("?")[0]
        refused = self.refusal()
        if refused is not None:
            self.refuse(*refused)
        return refused is None

    def refusal(self) -> tuple[int, str] | None:
        """Return status and sentence to refuse a request by its head; None to answer it."""
        hosts, asks = self.headers.get_all("Host", []), self.command == "POST"
        if len(hosts) != 1 or not _OWN_HOST.fullmatch(hosts[0].lower()):
            return 400, "The explorer answers requests for 127.0.0.1 and localhost only."
        known = {f"/ask/{name}" for name in Questions.NAMES} if asks else self.server.page
        if self.path not in known or self.command not in ("GET", "POST"):
            return 404, "The explorer has no such page."
        site = (
            "none" if self.path == "/" else self.headers.get("Sec-Fetch-Site", "none")
        )  # any site may link to the page itself
        own, origins = f"http://{hosts[0].lower()}", self.headers.get_all("Origin", [])
        if site not in ("none", "same-origin") or any(origin.lower() != own for origin in origins):
            return 403, "The explorer answers its own page only, not pages of other sites."
        if not asks:
            return None
        if self.headers.get_content_type() != "application/json":
            return 415, "A question must be application/json."
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length):
            return 411, "A question must give its length in bytes (Content-Length)."
        return (413, "The question is too large.") if int(length) > MAX_QUESTION_BYTES else None

    def do_GET(self) -> None:
        self.send(200, *self.server.page[self.path])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.answering:
            try:
                with one_sentence("The question is not valid JSON"):
                    question = json.loads(body)
            except InputError as error:
                return self.refuse(400, f"{error}.")
            answer = self.server.questions.answer(self.path.removeprefix("/ask/"), question)
        return self.send(200, answer.encode(), "application/json")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        self.refuse(400, "The request is not valid HTTP.")

    def refuse(self, status: int, sentence: str) -> None:
        self.send(status, json.dumps({"error": sentence}).encode(), "application/json")

    def send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response_only(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))} | _HEADERS
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def finish(self) -> None:
        super().finish()
        _shut(self.connection, socket.SHUT_WR)
        with suppress(OSError):  # read the rest of a refused request first, or the browser might lose the answer
            for _ in range(MAX_QUESTION_BYTES // 2**16):
                if not self.connection.recv(2**16):
                    break

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _shut(connection: socket.socket, how: int) -> None:
    with suppress(OSError):  # closed already
        connection.shutdown(how)
