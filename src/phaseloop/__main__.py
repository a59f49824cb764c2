"""`python -m phaseloop` is `phaseloop`."""

import sys

from phaseloop.cli.main import main

sys.exit(main())
