"""Hostile requests to a running `torchcaps explore`: foreign pages, hosts, methods, bodies, sizes and paths."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import ClassVar
from urllib.parse import quote

from hostile.edits import ODD_VALUES, with_digits
from hostile.fixtures import SIDE
from hostile.program import LAUNCHER
from hostile.trials import DONE, MOST_MEMORY, WRONG_INPUT, Part, Rules, Trial, say

FOREIGN = (
    *("http://evil.example", "https://127.0.0.1:1", "http://localhost:1234", "null", "http://127.0.0.1.evil.example"),
    *("file://", "http://[::1]:9", "HTTP://EVIL.EXAMPLE", "http://evil.example\t", "chrome-extension://abc", "''"),
)
HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "",
    "localhost:99999",
    "[::1]",
    "0.0.0.0",
    "x" * 5000,
    "127.1",
    "a b",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW")
PATHS = (
    *("/", "/config", "/info", "/gradio_api/info", "/gradio_api/component_server", "/gradio_api/upload", "/theme.css"),
    *(
        "/gradio_api/queue/join",
        "/gradio_api/run/predict",
        "/gradio_api/call/x",
        "/gradio_api/heartbeat/x",
        "/monitoring",
    ),
    *("/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/file=../../../etc/passwd", "/static/../../x"),
    *("/assets/..%2f..%2f..%2fetc%2fpasswd", "/static/%2e%2e/%2e%2e/etc/passwd", "/gradio_api/file=run/last.ckpt"),
    *("/gradio_api/proxy=http://127.0.0.1:9/", "/gradio_api/file=http://127.0.0.1:9/x", "/gradio_api/openapi.json"),
    *("/svelte/../../../../etc/passwd", "/custom_component/x/y/z/../../../etc/passwd", "//etc/passwd", "/..%00/x"),
    *("/gradio_api/stream/x/0/0/playlist.m3u8", "/gradio_api/queue/data?session_hash=x", "/docs", "/openapi.json"),
    *(
        "/gradio_api/upload_progress?upload_id=x",
        "/gradio_api/vibe-code",
        "/gradio_api/dev/reload",
        "/login",
        "/logout",
    ),
    *("/gradio_api/file=/proc/self/environ", "/gradio_api/file=C:\\x", "/gradio_api/reset", "/gradio_api/cancel"),
    *(
        "/ask",
        "/ask/",
        "/ask/look/",
        "/ask/look/x",
        "/ask/../config",
        "/ask/%2e%2e/config",
        "/ask/look%00",
        "/ASK/LOOK",
    ),
    *("/assets/", "/assets/.x", "/assets/../config", "/static//x", "/favicon.ico/x", "/theme.css?x=1#y"),
)
SECRETS = (b"root:x:0", b"Traceback (most recent", b"HF_HOME=", b"PYTHONPATH=", b"site-packages/", b"PYTORCH")
"""What no answer may hold: files of the machine, its environment, and the places where the program lies."""
ASK = "/ask/"
"""What the paths of questions begin with."""
QUESTIONS = ("look", "decode", "pick", "read")
OWN = f"{ASK}look"
"""The question of which the page's own is one."""
UPLOAD = "/gradio_api/upload"
SERVED = {
    "GET": ("/", "/theme.css", "/theme.css?x=1#y"),
    "HEAD": ("/",),
    "POST": tuple(f"{ASK}{name}" for name in QUESTIONS),
}
"""Of the paths that are asked for, those where something is."""
NOTHING = (0, 400, 404)
"""How all others are answered: the connection is closed, it is no request for this machine, or nothing is there."""
TOO_LARGE = b'"' + b" " * (48 * 2**20)
"""A question larger than any image file that is taken, and its quotation mark is never closed."""
MOST_UPLOADED = 64 * 2**20
"""Bytes that may lie in the server's temporary folder at any time."""
READ = 2**20
"""Bytes of an answer that are looked at."""


class Requests(Part):
    """Hostile requests.

    Each is answered with a status below 500 and without a secret, or the connection is closed. Where nothing of the
    page is, as at Gradio's own addresses, nothing is found. A page of another origin gets no question answered and no
    leave to read an answer (CORS), and other hosts get nothing at all. In the end the server still answers the page's
    own question, ends by Ctrl-C, and its temporary folder is empty.
    """

    name, cases, share, alone = "requests", 500, 0.05, True

    files: ClassVar = ("explorer-tmp", "explorer.log")
    """What it keeps beside the folders of its cases."""

    def __enter__(self) -> Requests:
        folder = self.fixtures.parent
        self.temporary, self.log = (folder / name for name in self.files)
        self.temporary.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        arguments = ["explore", "run", "--data", "npz:data.npz", "--no-browser", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                [sys.executable, str(folder / LAUNCHER), *arguments],
                cwd=self.fixtures,
                env=os.environ | {"TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
            self.began_with = self._peak_mib()
        except BaseException:
            self.server.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.server.poll() is None:
            self.server.kill()
            self.server.wait()

    def _wait_until_ready(self) -> None:
        for _ in range(600):
            if self.server.poll() is not None:
                break
            with contextlib.suppress(OSError):  # it listens some time before it answers
                if _exchange(self.port, "GET", "/", {"Host": f"127.0.0.1:{self.port}"}, b"")[0] == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the explorer did not start:\n{self.log.read_text(errors='replace')}")

    def _peak_mib(self) -> float:
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1024

    def trial(self, number: int, random: Random, folder: Path) -> Trial:
        """A request, and what its answer must not be."""
        method, path, headers, body = _draw(random, self.port)
        what = f"{method} {path!r:.100} { ({key: value[:60] for key, value in headers.items()}) } {len(body):,} bytes"
        work = partial(_ask, self.port, method, path, headers, body, self.temporary, self.log)
        return Trial(number, what, work, folder, Rules(timeout=self.timeout + 10, says_faults=True, terminal=False))

    def at_the_end(self) -> list[str]:
        """Whether the server is alive and well, ends, and leaves nothing."""
        wrong = []
        if self.server.poll() is not None:
            return [f"the explorer ended with {self.server.returncode}: {self.log.read_text(errors='replace')[-2000:]}"]
        question = _own_question()
        status, _, answer = _exchange(self.port, "POST", OWN, _own_headers(self.port, question), question)
        if status != 200 or b"scores" not in answer:
            wrong.append(f"the page's own question is answered with {status}: {answer[:200]!r}")
        if (more := self._peak_mib() - self.began_with) > MOST_MEMORY:
            wrong.append(f"the explorer took {more:.0f} MiB more than it began with")
        self.server.send_signal(signal.SIGINT)
        try:
            code = self.server.wait(15)
        except subprocess.TimeoutExpired:
            return [*wrong, "the explorer does not end by Ctrl-C"]
        if code not in (0, 130):
            wrong.append(f"the explorer ended with {code}")
        if left := list(self.temporary.rglob("*")):
            size = sum(path.stat().st_size for path in left if path.is_file())
            few = ", ".join(ascii(str(path.relative_to(self.temporary))) for path in left[:3])
            wrong.append(f"left in the temporary folder: {len(left)} entries, {size:,} bytes: {few}")
        return wrong


def _own_question() -> bytes:
    """What the page asks at OWN of a black image."""
    return json.dumps({"pixels": base64.b64encode(bytes(SIDE * SIDE)).decode()}).encode()


def _own_headers(port: int, body: bytes) -> dict[str, str]:
    own = f"http://127.0.0.1:{port}"
    kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    return {"Host": f"127.0.0.1:{port}", "Origin": own, "Sec-Fetch-Site": "same-origin", **kind}


def _draw(random: Random, port: int) -> tuple[str, str, dict[str, str], bytes]:
    """A request, of one of seven kinds."""
    kind = random.choice(("foreign", "foreign", "host", "path", "question", "question", "upload", "head", "body"))
    question = _own_question()
    method, path, headers, body = "POST", OWN, _own_headers(port, question), question
    match kind:
        case "foreign":  # as a page elsewhere may send them: simple requests, and those that ask for leave first
            headers |= {
                "Origin": random.choice(FOREIGN),
                "Content-Type": random.choice(("text/plain", "application/json")),
            }
            headers["Sec-Fetch-Site"] = random.choice(("cross-site", "same-site", "none"))
            if random.random() < 0.3:
                del headers[random.choice(("Origin", "Sec-Fetch-Site"))]
            if random.random() < 0.3:
                method, path = random.choice(METHODS), random.choice((OWN, UPLOAD, "/", "/config"))
            if method == "OPTIONS":
                headers["Access-Control-Request-Method"] = "POST"
        case "host":
            headers["Host"] = random.choice(HOSTS)
            method, path = random.choice((("POST", OWN), ("GET", random.choice(PATHS))))
        case "path":
            method, path = random.choice(METHODS[:4]), random.choice(PATHS)
            path = path.replace("etc", "%65tc") if random.random() < 0.2 else path
            body = random.choice((b"", question, b"{}"))
        case "question":
            path, body = _odd_question(random)
        case "upload":
            path, body, headers["Content-Type"] = _upload(random)
            if random.random() < 0.4:
                headers |= {"Origin": random.choice(FOREIGN), "Sec-Fetch-Site": "cross-site"}
        case "head":
            name = random.choice(
                ("X-Forwarded-Host", "Cookie", "Range", "Transfer-Encoding", "Expect", "Upgrade", "X-é")
            )
            headers[name] = random.choice(
                ("chunked", "bytes=0-99999999999", "100-continue", "websocket", "x" * 70_000, "")
            )
            path = random.choice((OWN, *PATHS))
        case "body":
            body = random.choice(
                (b"", b"\0" * 100, b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff\xfe", b"null", TOO_LARGE)
            )
            path = random.choice((*SERVED["POST"], "/gradio_api/queue/join", "/gradio_api/run/x", "/gradio_api/reset"))
    headers["Content-Length"] = str(len(body))
    if random.random() < 0.03:
        headers["Content-Length"] = random.choice(("-1", "99999999999", "x", str(len(body) + 5), str(len(body) // 2)))
    return method, path, headers, body


def _odd_question(random: Random) -> tuple[str, bytes]:
    """The path and the body of a question with odd values in them."""
    value = random.choice(ODD_VALUES)
    bomb = base64.b64encode(_bomb()).decode() if random.random() < 0.1 else "AAAA"
    asked, data = random.choice(
        (
            ("look", {"pixels": value}),
            ("pick", {"index": value}),
            ("decode", {"classes": value, "poses": [[0.0] * 16]}),
            ("decode", {"classes": [0], "poses": value}),
            ("read", {"name": value, "data": bomb}),
            ("read", {"name": "x.png", "data": bomb}),
            ("read", {"name": "x.png", "data": base64.b64encode(random.randbytes(1000)).decode()}),
            (random.choice(QUESTIONS), value),
        )
    )
    name = random.choice((*[asked] * 8, *QUESTIONS, "", "__class__", "nothing", value))
    question = random.choice((data, data, data, [data], [], [data, data]))
    made: list[str] = []
    with_digits(lambda: made.extend((str(name), json.dumps(question))))
    return ASK + quote(made[0], safe=random.choice(("", "/:@=;")), errors="surrogatepass"), made[1].encode()


def _bomb() -> bytes:
    from hostile.edits import _png, _zeros

    side = 13_300
    return _png(side, side, 8, 0, _zeros(side * (side + 1)))


def _upload(random: Random) -> tuple[str, bytes, str]:
    """A file sent to the server, small or large, with an odd name."""
    name = random.choice(("x.png", "../../x", "/etc/x", "x" * 300, "a\x1b[31m", "", "é", ".html", "x\x00y"))
    size = random.choice((0, 1, 1000, 1000, 10**6, 30 * 2**20))
    head = f'--b\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    end = random.choice((b"\r\n--b--\r\n", b"\r\n--b--\r\n", b""))
    path = random.choice((UPLOAD, UPLOAD + "?upload_id=x", "/gradio_api/process_recording", *SERVED["POST"]))
    return (
        path,
        head + bytes(size) + end,
        random.choice(("multipart/form-data; boundary=b",) * 4 + ("multipart/form-data",)),
    )


def _exchange(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes, most: int = READ
) -> tuple[int, dict[str, str], bytes]:
    """Send a request as it is, however wrong; the status (0: the connection was closed), the headers and the body."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items()), "Connection: close"]
    start = "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n"
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 15) as connection:
        connection.settimeout(15)
        whole = headers.get("Content-Length", "0") == str(len(body)) and "Transfer-Encoding" not in headers
        with contextlib.suppress(OSError):  # it has heard enough, and may have answered
            connection.sendall(start + body)
        try:
            if not whole:  # else the server waits for the rest, as it may
                connection.shutdown(socket.SHUT_WR)
            while len(answer) < most and (more := connection.recv(65_536)):
                answer += more
                connection.settimeout(2)  # what streams does not end
        except TimeoutError:
            if not answer:
                raise
        except OSError:
            pass
    head, _, found = answer.partition(b"\r\n\r\n")
    first, *others = head.decode("latin-1").split("\r\n")
    words = first.split()
    named = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in others)}
    return (int(words[1]) if len(words) > 1 else 0), named, found


def _ask(port: int, method: str, path: str, headers: dict[str, str], body: bytes, temporary: Path, log: Path) -> int:
    """Send a request and judge the answer; 0 if it was answered, 2 if refused, else 70 and why."""
    before = log.stat().st_size
    status, named, answer = _exchange(port, method, path, headers, body)
    own = {f"http://127.0.0.1:{port}", f"http://localhost:{port}"}
    foreign = headers.get("Origin", "") not in (*own, "") or headers.get("Sec-Fetch-Site") in (
        "cross-site",
        "same-site",
    )
    wrong = []
    if status >= 500:
        wrong.append(f"status {status}: {answer[:300]!r}")
    if found := [secret for secret in SECRETS if secret in answer]:
        wrong.append(f"a secret: {found[0]!r}")
    if path not in SERVED.get(method, ()) and status not in NOTHING:
        wrong.append(f"status {status} where nothing of the page is")
    if foreign and path.startswith(ASK) and 200 <= status < 300:
        wrong.append(f"a foreign page is answered: {headers.get('Origin')}")
    allowed = named.get("access-control-allow-origin")
    if allowed is not None and allowed not in own:
        wrong.append(f"a foreign page may read: {allowed}")
    host = headers.get("Host", "").rpartition(":")[0] or headers.get("Host", "")
    if host not in ("127.0.0.1", "localhost") and 200 <= status < 300:
        wrong.append(f"another host is answered: {headers.get('Host', '')[:50]!r}")
    lies = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    if lies > MOST_UPLOADED:
        wrong.append(f"uploads are kept: {lies:,} bytes")
    if b"Traceback (most recent call last)" in (said := log.read_bytes()[before:]):
        wrong.append(f"a traceback of the server's: {said[-600:]!r}")
    print(f"{status} {answer[:200]!r}")
    return say(wrong) or (DONE if 200 <= status < 400 else WRONG_INPUT)
