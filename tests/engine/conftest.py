"""Make the helpers beside these tests importable, and the tiny models of the model's tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "model")]
