"""The server: on this machine only, at the port that was named or a free one."""

from __future__ import annotations

import socket

import pytest

from support import assert_raises
from torchcaps.errors import InputError
from torchcaps.explorer import server
from torchcaps.explorer.server import listen


def test_only_this_machine_can_connect() -> None:
    with listen(0) as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        assert port > 0
        with socket.create_connection((host, port), timeout=5):
            accepted, _ = listening.accept()
            with accepted:  # sends at once: a body that waits for its head to be confirmed comes 40 ms later
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_port_that_is_taken() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        assert_raises(InputError, listen, port, say=f"port {port} is taken by another program; name another")


def test_another_port_where_none_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(0) as taken:
        monkeypatch.setattr(server, "PORT", taken.getsockname()[1])
        with listen(None) as other:
            assert other.getsockname()[1] != server.PORT
    with listen(None) as wanted:
        assert wanted.getsockname()[1] == server.PORT


def test_a_port_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert_raises(InputError, listen, 80, say="port 80 may not be used by this user")


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert_raises(OSError, listen, None, say="Cannot assign requested address")
