"""The socket, open before anything slow is done: who asks meanwhile hears that it loads."""

import errno
import socket
import stat
from contextlib import suppress
from pathlib import Path

from .errors import UserError
from .serve_settings import Settings

BACKLOG = 1024
REMEDIES = {
    errno.EADDRINUSE: "the port is taken; choose another with --port, or end who has it",
    errno.EACCES: "ports below 1024 are the superuser's; choose another with --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; see --host",
}


def bind(settings: Settings) -> socket.socket:
    """A listening socket.  Raises UserError."""
    path = socket_path(settings)
    if path is not None:
        return bind_path(path)
    family, address = resolved(settings.host, settings.port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        remedy = REMEDIES.get(error.errno or 0, "see --host and --port")
        raise UserError(f"cannot listen on {where}: {error.strerror or error}; {remedy}") from None
    return listener


def socket_path(settings: Settings) -> Path | None:
    """Of a Unix socket, which is left to be removed when the server ends."""
    is_path = settings.host.endswith(".sock")
    return Path(settings.host.removeprefix("unix:")) if is_path else None


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name"
        raise UserError(f"--host {host}: {reason}; name an address such as 127.0.0.1") from None
    family, _, _, _, address = found[0]
    return family, address


def bind_path(path: Path) -> socket.socket:
    """A Unix socket.  What a dead server left there is replaced, a living one's is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def url_of(listener: socket.socket, prefix: str) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix.rstrip('/')}"
