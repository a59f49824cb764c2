"""Make the helpers beside the tests, and the scripted engine of the runtime's, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "runtime"))
