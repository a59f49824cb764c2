"""Make the helpers beside the tests importable, and offer --rewrite for the golden transcripts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the core does now into fixtures/transcripts, for review",
    )
