"""Tiny models are written by tests/model/synthetic.py; sequences of rows are shared here."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "model"):
    sys.path.insert(0, str(folder))
