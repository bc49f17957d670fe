"""Who is answered: real requests to the page as it is served, by its own page, other sites and other programs."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from explorer_support import no_gradio, served, small_network
from support import holds
from torchcaps.explorer import Explorer, messages
from torchcaps.explorer.guard import refusal

pytestmark = pytest.mark.skipif(no_gradio() is not None, reason=no_gradio() or "")

LOOK = json.dumps({"pixels": base64.b64encode(bytes(18 * 20)).decode()}).encode()
JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Site:
    """The page as it is served, and requests to it."""

    def __init__(self, address: str) -> None:
        self.port = urlsplit(address).port
        self.origin = f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: bytes | None = None, *headers: tuple[str, str]) -> Answer:
        """Send a request with these headers; a Host of its own only where there is none among them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        own_host = any(name == "Host" for name, _ in headers)
        connection.putrequest(method, path, skip_host=own_host, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answered = connection.getresponse()
        answer = Answer(answered.status, answered.headers, answered.read())
        connection.close()
        return answer

    def look(self, *headers: tuple[str, str]) -> Answer:
        return self.ask("POST", "/ask/look", LOOK, *headers)

    def line(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def say(self, text: bytes) -> bytes:
        """Send what need not be a request, and read what comes before the server closes."""
        with self.line() as line:
            line.sendall(text)
            return b"".join(iter(lambda: line.recv(2**16), b""))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with served(Explorer(small_network())) as address:
        yield Site(address)


def assert_refused(answer: Answer, status: int) -> None:
    """One sentence, and nothing by which a browser would let another site's page read it."""
    assert answer.status == status, answer
    assert answer.body.count(b"\n") == 1
    assert answer.body.startswith(b"The explorer ")
    assert answer.body.endswith(b".\n")
    assert_no_leave(answer)


def assert_no_leave(answer: Answer) -> None:
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


ORIGINS = ["http://evil.example", "http://localhost:1234", "http://127.0.0.1", "https://127.0.0.1:1", "null", ""]
LINK = (("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document"))


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_other_origins_are_refused(site: Site, origin: str) -> None:
    for method, path in (("GET", "/"), ("GET", "/theme.css"), ("HEAD", "/"), ("POST", "/ask/look")):
        for kind in (JSON, "text/plain"):
            answer = site.ask(method, path, LOOK, ("Origin", origin), ("Content-Type", kind))
            assert answer.status == 403
            assert_no_leave(answer)
    assert_refused(site.look(("Origin", origin), ("Content-Type", JSON)), 403)
    mine_too = (("Origin", site.origin), ("Origin", origin), ("Content-Type", JSON))
    assert_refused(site.look(*mine_too), 403)


@pytest.mark.parametrize("whose", ["cross-site", "same-site", "nonsense"])
def test_what_the_browser_says_is_another_sites_is_refused(site: Site, whose: str) -> None:
    foreign = ("Sec-Fetch-Site", whose)
    assert_refused(site.look(foreign, ("Content-Type", JSON)), 403)
    assert_refused(site.look(foreign, ("Origin", site.origin), ("Content-Type", JSON)), 403)
    assert_refused(site.ask("GET", "/", None, foreign), 403)
    assert_refused(site.ask("GET", "/", None, foreign, *LINK[1:2], ("Sec-Fetch-Dest", "iframe")), 403)
    assert_refused(site.ask("GET", "/theme.css", None, foreign, *LINK[1:]), 403)
    assert_refused(site.look(foreign, *LINK[1:], ("Content-Type", JSON)), 403)


def test_the_page_itself_is_answered(site: Site) -> None:
    for host in (f"127.0.0.1:{site.port}", f"localhost:{site.port}", f"LOCALHOST:{site.port}", "localhost:9000"):
        own = (("Host", host), ("Origin", f"http://{host}"), ("Sec-Fetch-Site", "same-origin"))
        answer = site.look(*own, ("Content-Type", f"{JSON}; charset=utf-8"))
        assert answer.status == 200
        assert len(json.loads(answer.body)["scores"]) == 4
        assert_no_leave(answer)
        assert site.ask("GET", "/theme.css", None, *own).status == 200


def test_what_names_no_origin_is_answered(site: Site) -> None:
    """Such as curl, an address that was typed, and a link on another site, which may open the page."""
    assert site.look(("Content-Type", JSON)).status == 200
    for headers in ((), (("Sec-Fetch-Site", "none"),), LINK):
        answer = site.ask("GET", "/?__theme=dark", None, *headers)
        assert answer.status == 200
        assert b"torchcaps explorer" in answer.body
        assert_no_leave(answer)
    assert site.ask("HEAD", "/").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:7860", "evil.example:80@localhost", "127.0.0.2", "0.0.0.0", ""]
)
def test_other_names_for_this_machine_are_refused(site: Site, host: str) -> None:
    for method, path, body in (("GET", "/", None), ("POST", "/ask/look", LOOK), ("GET", "/assets/x.js", None)):
        assert_refused(site.ask(method, path, body, ("Host", host), ("Content-Type", JSON)), 400)
    own = site.say(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert own.startswith(b"HTTP/1.1 200 ")
    for hosts in ("", f"Host: localhost\r\nHost: {host}\r\n"):
        assert site.say(f"GET / HTTP/1.1\r\nConnection: close\r\n{hosts}\r\n".encode()).startswith(b"HTTP/1.1 400 ")
    assert site.say(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


UPLOAD = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--x--\r\n'
NOT_SERVED = [
    ("POST", "/gradio_api/upload"),
    ("POST", "/gradio_api/component_server"),
    ("POST", "/gradio_api/component_server/"),
    ("POST", "/gradio_api/process_recording"),
    ("POST", "/gradio_api/queue/join"),
    ("POST", "/gradio_api/call/look"),
    ("GET", "/gradio_api/queue/data?session_hash=x"),
    ("GET", "/gradio_api/heartbeat/x"),
    ("GET", "/gradio_api/file=/etc/passwd"),
    ("GET", "/gradio_api/proxy=http://evil.example/"),
    ("GET", "/gradio_api/info"),
    ("GET", "/config"),
    ("GET", "/monitoring"),
    ("POST", "/login"),
    ("GET", "/openapi.json"),
    ("GET", "/assets/../../../../../../etc/passwd"),
    ("GET", "/static/%2e%2e/%2e%2e/index.html"),
    ("GET", "/static/..%2f..%2findex.html"),
    ("GET", "/assets//etc/passwd"),
    ("GET", "/assets/%00"),
    ("GET", "/ask/look"),
    ("POST", "/"),
    ("PUT", "/"),
    ("DELETE", "/assets/x.js"),
    ("OPTIONS", "/"),
    ("TRACE", "/"),
]


@pytest.mark.parametrize(("method", "path"), NOT_SERVED)
def test_the_rest_of_gradio_is_not_served(site: Site, method: str, path: str) -> None:
    headers = (("Origin", site.origin), ("Content-Type", "multipart/form-data; boundary=x"))
    assert_refused(site.ask(method, path, UPLOAD, *headers), 404)


def test_no_other_site_gets_leave_in_advance(site: Site) -> None:
    asked = (("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "content-type"))
    for origin in ("http://localhost:1234", site.origin):
        assert_refused(site.ask("OPTIONS", "/ask/look", None, ("Origin", origin), *asked), 404)


def test_no_web_socket_is_opened(site: Site) -> None:
    upgrade = (
        "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
    )
    for path in ("/", "/gradio_api/stream", "/ask/look"):
        answer = site.say(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n".encode())
        assert b"HTTP/1.1 101" not in answer


def test_a_question_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = b"{" + b" " * (2**21) + b"}"
    answer = site.ask("POST", "/ask/look", too_long, ("Content-Type", JSON))
    assert (answer.status, json.loads(answer.body)) == (413, {"error": "The question is too large."})
    head = f"POST /ask/look HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {JSON}\r\n"
    part = b"8000\r\n" + b" " * 2**15 + b"\r\n"
    in_parts = site.say(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + 34 * part)
    assert in_parts.startswith(b"HTTP/1.1 413 ")
    assert site.ask("POST", "/ask/read", too_long, ("Content-Type", JSON)).status == 200  # a sentence: no image in it
    monkeypatch.setattr(messages, "LARGEST_FILE", 1000)
    assert site.ask("POST", "/ask/read", too_long, ("Content-Type", JSON)).status == 413


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (LOOK, "text/plain", 415),
        (LOOK, "", 415),
        (LOOK, "multipart/form-data; boundary=x", 415),
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b"[" * 10**5 + b"]" * 10**5, JSON, 400),
        (b'{"pixels": ' + b"9" * 10**5 + b"}", JSON, 400),
        (b"null", JSON, 200),
        (b'{"pixels": NaN}', JSON, 200),
        (b'{"pixels": "\\ud800"}', JSON, 200),
    ],
)
def test_what_is_no_question_gets_a_sentence(site: Site, body: bytes, kind: str, status: int) -> None:
    answer = site.ask("POST", "/ask/look", body, ("Content-Type", kind))
    assert answer.status == status
    (sentence,) = json.loads(answer.body).values()
    assert sentence.endswith(".")


def test_questions_that_there_are_not(site: Site) -> None:
    for name in ("lok", "make", "answer"):
        answer = site.ask("POST", f"/ask/{name}", LOOK, ("Content-Type", JSON))
        assert (answer.status, json.loads(answer.body)) == (404, {"error": f"There is no question {name}."})


def test_who_goes_away_leaves_the_server_as_it_was(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    head = f"POST /ask/look HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: 1000\r\n\r\n"
    with site.line() as line:
        line.sendall(head.encode() + b"{")
    assert site.look(("Content-Type", JSON)).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_who_breaks_the_protocol_leaves_it_too(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    head = "POST /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    for part in (b"-1\r\n", b"zz\r\n"):
        with site.line() as line:
            line.sendall(head.encode() + part)
            while line.recv(2**16):
                pass
    assert site.look(("Content-Type", JSON)).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_assertions_can_fail() -> None:
    headers = http.client.HTTPMessage()
    headers["Cross-Origin-Resource-Policy"], headers["Content-Security-Policy"] = (
        "same-origin",
        "frame-ancestors 'none'",
    )
    refused = Answer(403, headers, b"The explorer answers nobody.\n")
    assert holds(assert_refused, refused, 403)
    assert not holds(assert_refused, refused, 404)
    assert not holds(assert_refused, Answer(403, headers, b"Traceback\n\n"), 403)
    assert not holds(assert_refused, Answer(403, http.client.HTTPMessage(), refused.body), 403)
    open_to_all = http.client.HTTPMessage()
    for name, value in (*headers.items(), ("Access-Control-Allow-Origin", "*")):
        open_to_all[name] = value
    assert not holds(assert_refused, Answer(403, open_to_all, refused.body), 403)


def test_a_request_without_any_header() -> None:
    assert refusal({"method": "GET", "path": "/", "headers": []}) is not None
    assert refusal({"method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}) is None
