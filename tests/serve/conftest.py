"""Make the tiny models of the model's tests importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "model"))
