"""The files of the live page, which lie in static/ and are served as they are."""

from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(Struct, frozen=True):
    content: bytes
    media_type: str
    tag: str  # of the content, for a browser that has it already


def assets() -> dict[str, Asset]:
    """Every file of static/, by its name."""
    return {
        path.name: asset(path) for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA_TYPES
    }


def asset(path: Path) -> Asset:
    content = path.read_bytes()
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return Asset(content, MEDIA_TYPES[path.suffix], tag)


ASSETS = assets()
