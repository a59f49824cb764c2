"""The logs as the settings want them."""

import logging

from .logs import LEVELS, OFF, Logs, start_logs
from .serve_settings import Settings

COLOURS = {"on": True, "off": False, "auto": None}


def logs_of(settings: Settings) -> Logs:
    """Raises UserError for a file that cannot be written."""
    level = LEVELS[settings.verbosity]
    if settings.verbose:
        level = logging.DEBUG
    if settings.log_disable:
        level = OFF
    return start_logs(
        level=level,
        form="json" if settings.log_json else settings.log_format,
        colours=COLOURS[settings.log_colors],
        path=settings.log_file,
    )
