"""The server: real requests of its own page, of other sites and of other programs, one by one and many at once."""

import base64
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from explorer_support import small_network
from torchcaps.errors import InputError
from torchcaps.explorer import Explorer, server, serving
from torchcaps.explorer.questions import MAX_QUESTION_BYTES

LOOK = json.dumps({"pixels": base64.b64encode(bytes(18 * 20)).decode()}).encode()
JSON = "application/json"
Answer = http.client.HTTPResponse


class Site:
    """The page as it is served, and requests to it."""

    def __init__(self, address: str) -> None:
        self.port = urlsplit(address).port
        self.origin = f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: bytes | None = None, *headers: tuple[str, str]) -> Answer:
        """Send a request with these headers; a Host of its own only where there is none among them.

        No answer is one that a browser would give to another site's page.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        own_host = any(name == "Host" for name, _ in headers)
        connection.putrequest(method, path, skip_host=own_host, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        with suppress(BrokenPipeError):  # the server refuses a question before all of it has come
            connection.endheaders(body)
        answer = connection.getresponse()
        answer.body = answer.read()
        connection.close()
        assert "access-control" not in str(answer.headers).lower()
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] == "no-store"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
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
    with serving([Explorer(small_network())], 0) as address:
        yield Site(address)


def assert_refused(answer: Answer, status: int) -> None:
    """One sentence."""
    assert answer.status == status, answer
    (sentence,) = json.loads(answer.body).values()
    assert sentence.endswith(".")


def test_the_page_and_all_that_it_names_is_served(site: Site) -> None:
    page = site.ask("GET", "/")
    assert (page.status, page.headers.get_content_type()) == (200, "text/html")
    named, texts = set(), [page.body, site.ask("GET", "/playground.html").body]
    for text in texts:  # modules name others
        found = set(re.findall(rb'<(?:script .*?src|link rel="stylesheet" href)="(.+?)"| from "\./(.+?)";', text))
        new = {one or other for one, other in found} - named
        named |= new
        texts += [site.ask("GET", f"/{name.decode()}").body for name in sorted(new)]
    folder = Path(server.__file__).parent / "page"
    others = {"page.html", "playground.html", "browser.js"}  # without a server, the last takes the place of ask.js
    assert {name.decode() for name in named} == {path.name for path in folder.iterdir()} - others | {"about.js"}
    for name in named:
        answer = site.ask("GET", f"/{name.decode()}")
        assert answer.status == 200
        assert answer.headers.get_content_type() == ("text/css" if name.endswith(b"css") else "text/javascript")
    about = json.loads(site.ask("GET", "/about.js").body.removeprefix(server.ABOUT.encode()).removesuffix(b";"))
    assert about["networks"][0]["shape"] == [1, 18, 20]


# ---- whose requests are answered

TYPE = ("Content-Type", JSON)
ORIGINS = ("http://evil.example", "http://localhost:1234", "http://127.0.0.1", "https://127.0.0.1:1", "null", "")
HOSTS = ("evil.example", "localhost.evil.example:7860", "evil.example:80@localhost", "127.0.0.2", "0.0.0.0", "")
HOSTS += ("localhost:x", "localhost:7860:7860", "[::1]")
PATHS = ("/page.html", "/server.py", "/../server.py", "/..%2fserver.py", "/%2e%2e/server.py", "//etc/passwd", "/%00")


def test_requests_of_other_sites_are_refused(site: Site) -> None:
    own = ("Origin", site.origin)
    for origin in (("Origin", each) for each in ORIGINS):
        for method, path in (("GET", "/"), ("GET", "/about.js"), ("POST", "/ask/look")):
            for kind in (JSON, "text/plain"):
                assert_refused(site.ask(method, path, LOOK, origin, ("Content-Type", kind)), 403)
        assert_refused(site.look(own, origin, TYPE), 403)
    for foreign in (("Sec-Fetch-Site", each) for each in ("cross-site", "same-site", "nonsense")):
        assert_refused(site.look(foreign, TYPE), 403)
        assert_refused(site.look(foreign, own, TYPE), 403)
        assert_refused(site.ask("GET", "/about.js", None, foreign), 403)
    for host in HOSTS:
        for method, path, body in (("GET", "/", None), ("POST", "/ask/look", LOOK), ("GET", "/x.js", None)):
            assert_refused(site.ask(method, path, body, ("Host", host), TYPE), 400)
        for hosts in ("", f"Host: localhost\r\nHost: {host}\r\n"):
            assert site.say(f"GET / HTTP/1.1\r\n{hosts}\r\n".encode()).startswith(b"HTTP/1.0 400 ")
    assert site.say(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 400 ")


def test_nothing_but_the_page_is_served(site: Site) -> None:
    methods = ("PUT /", "DELETE /core.js", "OPTIONS /ask/look", "TRACE /", "CONNECT /", "BREW /", "POST /")
    questions = ("GET /ask/look", "POST /ask/lok", "POST /ask/answer", "POST /ask/__class__")
    for method, path in (each.split() for each in (*(f"GET {path}" for path in PATHS), *methods, *questions)):
        assert_refused(site.ask(method, path, LOOK, ("Origin", site.origin), TYPE), 404)


def test_the_page_itself_is_answered_and_what_names_no_origin(site: Site) -> None:
    for host in (f"127.0.0.1:{site.port}", f"localhost:{site.port}", f"LOCALHOST:{site.port}", "localhost:9000"):
        own = (("Host", host), ("Origin", f"http://{host}"), ("Sec-Fetch-Site", "same-origin"))
        answer = site.look(*own, ("Content-Type", f"{JSON}; charset=utf-8"))
        assert (answer.status, answer.headers.get_content_type()) == (200, JSON)
        assert len(json.loads(answer.body)["scores"]) == 4
        assert site.ask("GET", "/about.js", None, *own).status == 200
    # such as curl, an address that was typed, and a link on another site, which may open the page
    assert site.look(TYPE).status == 200
    for headers in ((), (("Sec-Fetch-Site", "none"),), (("Sec-Fetch-Site", "cross-site"),)):
        answer = site.ask("GET", "/?a=b", None, *headers)
        assert answer.status == 200
        assert b"torchcaps explorer" in answer.body


def test_a_question_is_json_and_bounded(site: Site) -> None:
    too_large, deep = b" " * (MAX_QUESTION_BYTES + 1), b"[" * 10**5 + b"]" * 10**5
    kinds = ("text/plain", "", "multipart/form-data; boundary=x")
    no_json = (b"", b"{", b"\xff\xfe", too_large[1:], deep, b'{"pixels": ' + b"9" * 10**5 + b"}")
    no_image = (b"null", b'{"pixels": NaN}', b'{"pixels": "\\ud800"}')
    for status, kind, body in (
        *((415, kind, LOOK) for kind in kinds),
        *((400, JSON, body) for body in no_json),
        *((200, JSON, body) for body in no_image),
        (413, JSON, too_large),
    ):
        assert_refused(site.ask("POST", "/ask/look", body, ("Content-Type", kind)), status)
    head = f"POST /ask/look HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
    for length in ("-1", "x", "1e3", "９", "9" * 5000, ""):
        refused = site.say(f"{head}Content-Length: {length}\r\n\r\n".encode())
        assert refused.startswith(b"HTTP/1.0 411 "), length
    part = b"8000\r\n" + b" " * 2**15 + b"\r\n"
    assert site.say(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + 34 * part).startswith(b"HTTP/1.0 411 ")


def test_what_is_no_http_and_who_goes_away_change_nothing(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    get, host = b"GET / HTTP/1.1\r\n", b"Host: localhost\r\n"
    for text in (
        b"\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",  # the start of TLS
        b"GET /" + b"x" * 10**5 + b" HTTP/1.1\r\n" + host + b"\r\n",
        get + host + b"X: " + b"x" * 10**5 + b"\r\n\r\n",
        get + host + b"X: x\r\n" * 1000 + b"\r\n",
    ):
        answer = site.say(text)
        assert not answer or answer.startswith(b"HTTP/1.0 400 ")
    head = f"POST /ask/look HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: 1000\r\n\r\n"
    for text in (b"", b"GET", head.encode() + b"{"):
        with site.line() as line:
            line.sendall(text)
    assert site.look(TYPE).status == 200
    assert capfd.readouterr().err == ""


def test_a_mistake_of_ours_is_seen_in_the_terminal_only(capfd: pytest.CaptureFixture[str]) -> None:
    explorer = Explorer(small_network())
    explorer.look = lambda *_: 1 / 0  # type: ignore[method-assign]
    with serving([explorer], 0) as address:
        site = Site(address)
        with pytest.raises(http.client.RemoteDisconnected):
            site.look(("Content-Type", JSON))
        assert site.ask("GET", "/").status == 200
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.slow
def test_slow_connections_do_not_stop_it_and_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTION_SECONDS", 1.0)
    with serving([Explorer(small_network())], 0) as address, ExitStack() as stack:
        site = Site(address)
        slow = [stack.enter_context(site.line()) for _ in range(20)]
        end = time.monotonic() + 20
        while slow and time.monotonic() < end:
            for line in list(slow):
                try:
                    line.sendall(b"P")
                except OSError:  # it is cut
                    slow.remove(line)
            with ThreadPoolExecutor(10) as pool:
                assert {answer.status for answer in pool.map(site.look, [TYPE] * 10)} == {200}
            time.sleep(0.1)
        assert not slow


def test_connections_are_bounded_and_do_not_keep_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with ExitStack() as stack, serving([Explorer(small_network())], 0) as address:
        site = Site(address)
        for text in (b"", b"GET / HTTP/1.1\r\n", b"GET"):
            stack.enter_context(site.line()).sendall(text)
        time.sleep(0.2)
        assert site.say(b"") == b""  # closed at once


def test_the_port(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with site.line() as line:
        assert line.getpeername() == ("127.0.0.1", site.port)
    with (
        pytest.raises(InputError, match=f"port {site.port} cannot be used: "),
        serving([Explorer(small_network())], site.port),
    ):
        pass
    monkeypatch.setattr(server, "PORT", site.port)  # it is taken: another one
    with serving([Explorer(small_network())]) as address:
        wanted = urlsplit(address).port
        assert wanted not in (None, site.port)
    monkeypatch.setattr(server, "PORT", wanted)
    with serving([Explorer(small_network())]) as address:
        assert urlsplit(address).port == wanted
