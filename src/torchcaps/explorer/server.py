"""Serving the page on this machine, and only to it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchcaps.errors import InputError
from torchcaps.explorer.page import make_app
from torchcaps.explorer.state import Explorer
from torchcaps.training.signals import noted_signals

if TYPE_CHECKING:
    import uvicorn

HOST = "127.0.0.1"
PORT = 7860
"""Taken where no port is named and it is free."""


def serve(explorer: Explorer, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        explorer: What is explored.
        port: Where to listen, on 127.0.0.1; 0 is any free port, None 7860 or, if that is taken, any free one.
        ready: Called with the page's address as soon as the browser may open it.

    Raises:
        InputError: Gradio is not installed, or the port is taken.
    """
    with listen(port) as listening:
        server = make_server(explorer)
        ready(f"http://{HOST}:{listening.getsockname()[1]}")
        # uvicorn passes on the signal that ended it, which would end this process before it has cleaned up
        with noted_signals(react=lambda: None):
            server.run(sockets=[listening])


def make_server(explorer: Explorer) -> uvicorn.Server:
    """The server of the page, to run on a socket.

    Raises:
        InputError: Gradio is not installed.
    """
    app = make_app(explorer)
    import uvicorn  # comes with gradio

    # a page left open holds a connection, which must not keep the server from ending
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))


def listen(port: int | None) -> socket.socket:
    """A socket on 127.0.0.1; see :func:`serve`.

    Raises:
        InputError: The port is taken, or may not be used by this user.
    """
    try:
        return socket.create_server((HOST, PORT if port is None else port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if port is None:
            return socket.create_server((HOST, 0))
        reason = "is taken by another program" if error.errno == errno.EADDRINUSE else "may not be used by this user"
        raise InputError(f"port {port} {reason}; name another with --port, or leave it out") from None
