"""The commands; the one place where the parts are put together."""

import sys

# How a process starts another of its kind.  -P: not with modules of the directory it happens to be
# in, which -m would put before all others.
PHASELOOP = (sys.executable, "-P", "-m", "phaseloop")
