"""The network block holds, also for code that swallows the refusal."""

import contextlib
import socket
import urllib.request

import pytest


@pytest.mark.parametrize("method", ["connect", "connect_ex"])
def test_a_connection_is_refused_and_remembered(blocked_sockets, method):
    address = ("127.0.0.1", 9)
    with socket.socket() as sock, pytest.raises(PermissionError, match="may not use the network"):
        getattr(sock, method)(address)
    assert blocked_sockets.take_attempts() == [(address,)]


def test_a_datagram_is_refused_and_remembered(blocked_sockets):
    with (
        socket.socket(type=socket.SOCK_DGRAM) as sock,
        pytest.raises(PermissionError, match="may not use the network"),
    ):
        sock.sendto(b"x", ("127.0.0.1", 9))
    assert blocked_sockets.take_attempts()


def test_a_refusal_that_is_swallowed_is_remembered(blocked_sockets):
    with contextlib.suppress(OSError):  # as a library does that falls back to its cache
        urllib.request.urlopen("http://localhost:9/", timeout=1)
    assert blocked_sockets.take_attempts()


def test_a_unix_socket_works(tmp_path):
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))
