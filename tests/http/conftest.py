"""Make the helpers beside the tests importable, and those of the layers that HTTP stands on."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

for helpers in (HERE, HERE.parent / "runtime", HERE.parent / "text"):
    sys.path.insert(0, str(helpers))
