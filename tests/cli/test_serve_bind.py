"""Goal: what keeps a server from listening is said with what would help.

Method: sockets on this machine, and names and addresses that it cannot have.
"""

import errno
import socket

import pytest

from phaseloop.cli.errors import UserError
from phaseloop.cli.serve_bind import bind, url_of
from phaseloop.cli.serve_settings import Settings


def settings(host: str = "127.0.0.1", port: int = 0, **others: bool) -> Settings:
    return Settings(sim="cpu-smollm2", host=host, port=port, **others)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_bound_socket_takes_connections_at_once(host):
    with bind(settings(host)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "/x/") == f"http://127.0.0.1:{port}/x"
        socket.create_connection(("127.0.0.1", port)).close()


def test_addresses_of_version_6_stand_in_brackets():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    try:
        listener = bind(settings("::1"))
    except UserError:
        pytest.skip("no IPv6 on this machine")
    with listener:
        assert url_of(listener, "").startswith("http://[::1]:")


@pytest.mark.parametrize(
    "host, parts",
    [
        ("192.0.2.1", ("192.0.2.1", "no such address")),  # reserved for documents
        ("no name", ("--host no name", "127.0.0.1")),
        ("a" * 70, ("--host aaa", "127.0.0.1")),  # longer than a label may be
    ],
)
def test_hosts_that_cannot_be(host, parts):
    with pytest.raises(UserError) as error:
        bind(settings(host))
    assert error.value.exit_code == 2
    for part in parts:
        assert part in str(error.value)


def test_a_port_that_only_the_superuser_may_have(monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:80: Permission denied; ports below 1024"):
        bind(settings(port=80))


def test_a_port_is_shared_only_by_those_who_say_so():
    with bind(settings(reuse_port=True)) as first:
        port = first.getsockname()[1]
        bind(settings(port=port, reuse_port=True)).close()
        with pytest.raises(UserError, match="Address already in use"):
            bind(settings(port=port))
