"""The page, drawn by one component of Gradio, and the answers to its questions, served to this machine only."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.errors import InputError
from torchcaps.explorer.guard import Guard
from torchcaps.explorer.learning import Learning
from torchcaps.explorer.messages import answers, describe_page, largest_question
from torchcaps.explorer.state import Explorer, check_side_by_side
from torchcaps.training.signals import noted_signals

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
PORT = 7860
"""Taken where no port is named and it is free."""
AT_ONCE = 2
"""Questions that are answered at the same time, so that a few large images fill no memory; others wait."""
_FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("core", "image", "capsules", "pose", "routing", "beside", "learning", "sharing", "start")
"""The files of the page's script, in this order: a panel each, between what they share and the start."""


def serve(explorers: Sequence[Explorer], port: int | None, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        explorers: What is explored: one network, or two side by side, whose images are those of the first.
        port: Where to listen, on 127.0.0.1; 0 is any free port, None 7860 or, if that is taken, any free one.
        ready: Called with the page's address as soon as the browser may open it.

    Raises:
        InputError: Gradio is not installed, the port is taken, or the networks see different images or classes.
    """
    check_side_by_side(explorers)
    with listen(port) as listening:
        server = make_server(explorers)
        ready(f"http://{HOST}:{listening.getsockname()[1]}")
        # uvicorn passes on the signal that ended it, which would end this process before it has cleaned up
        with noted_signals(react=lambda: None):
            server.run(sockets=[listening])


@contextmanager
def serving(learning: Learning, port: int | None, ready: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a network that learns, in a thread, as long as the context lasts; see :func:`serve`."""
    with listen(port) as listening:
        server = make_server([learning.explorer], learning)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            ready(f"http://{HOST}:{listening.getsockname()[1]}")
            yield
        finally:
            server.should_exit = True
            thread.join()


def make_server(explorers: Sequence[Explorer], learning: Learning | None = None) -> uvicorn.Server:
    """The server of the page, to run on a socket; InputError without Gradio."""
    app = make_app(explorers, learning)
    import uvicorn  # comes with gradio

    # a page left open holds a connection, which must not keep the server from ending
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))


def listen(port: int | None) -> socket.socket:
    """A socket on 127.0.0.1; see :func:`serve`."""
    try:
        return _prompt(socket.create_server((HOST, PORT if port is None else port)))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if port is None:
            return _prompt(socket.create_server((HOST, 0)))
        reason = "is taken by another program" if error.errno == errno.EADDRINUSE else "may not be used by this user"
        raise InputError(f"port {port} {reason}; name another with --port, or leave it out") from None


def _prompt(listening: socket.socket) -> socket.socket:
    """Connections that send at once: else the body of an answer waits until its head is confirmed, up to 40 ms."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    return listening


def make_app(explorers: Sequence[Explorer], learning: Learning | None = None) -> FastAPI:
    """The page as a web application, which takes questions of a bounded size and leaves no files behind.

    It answers its own page only, and forbids the browser to load anything from elsewhere: see
    :class:`~torchcaps.explorer.guard.Guard`.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    try:
        import gradio
        from fastapi import FastAPI
    except ModuleNotFoundError as error:
        raise InputError(
            f"the explorer needs {error.name}, which is not installed; pip install 'torchcaps[explore]'"
        ) from None

    background = {"body_background_fill": "#f5f5f2", "body_background_fill_dark": "#121215"}
    # plain names are fonts of the reader's own system; others would be fetched, from Google too
    theme = gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    app = FastAPI(openapi_url=None)  # its documentation pages load scripts from elsewhere
    app.add_middleware(Guard)
    add_answers(app, explorers, learning)
    with _gradio_elsewhere():
        with gradio.Blocks(title="torchcaps explorer", analytics_enabled=False, fill_width=True) as page:
            gradio.HTML(
                html_template=_read("page.html"),
                js_on_load="\n".join(_read(f"{name}.js") for name in SCRIPTS),
                apply_default_css=False,
                about=describe_page(explorers, learning),
            )
        return gradio.mount_gradio_app(
            app,
            page,
            path="/",
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            theme=theme.set(**background),
            head=f"<style>\n{_read('page.css')}</style>",
        )


@contextmanager
def _gradio_elsewhere() -> Iterator[None]:
    """Gradio makes a folder for what its users edit, which the guard lets nobody do: in a folder that goes."""
    from gradio import routes

    name = "DEFAULT_TEMP_DIR"
    usual = getattr(routes, name)
    with tempfile.TemporaryDirectory() as folder:
        setattr(routes, name, folder)
        try:
            yield
        finally:
            setattr(routes, name, usual)


def add_answers(app: FastAPI, explorers: Sequence[Explorer], learning: Learning | None = None) -> None:
    """Answer the page's questions: ``POST /ask/NAME``, JSON both ways, see :mod:`torchcaps.explorer.messages`."""
    import anyio
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse

    functions = {function.__name__: function for function in answers(explorers, learning)}
    limiter = anyio.CapacityLimiter(AT_ONCE)

    def answer(name: str, body: bytes) -> Response:
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "The question is not valid JSON."}, 400)
        return JSONResponse(functions[name](question))

    async def ask(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in functions:
            return JSONResponse({"error": f"There is no question {name}."}, 404)
        # a page of another site could send plain text without asking the browser for leave first
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "A question must be application/json."}, 415)
        try:
            body = await _read_body(request, largest_question(explorers[0], name))
            if body is None:
                return JSONResponse({"error": "The question is too large."}, 413)
            return await anyio.to_thread.run_sync(answer, name, body, limiter=limiter)
        except (ClientDisconnect, asyncio.CancelledError):  # nobody waits for an answer any more, or the server ends
            return JSONResponse({"error": "The question was broken off."}, 503)

    app.router.add_route("/ask/{name}", ask, methods=["POST"])


async def _read_body(request: Request, most: int) -> bytes | None:
    """The body of a request; None if it has more bytes than ``most``, of which no more are kept."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return bytes(body)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
