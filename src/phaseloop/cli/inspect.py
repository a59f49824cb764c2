"""`phaseloop inspect MODEL`: what a GGUF file holds, what serving it takes, and whether it can be.

The file's header is read and believed in nothing; no weight is computed with.  What cannot be
served is still described: each of architecture, tokenizer and template is tried by itself.
"""

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from phaseloop.model.gguf_file import ModelError
from phaseloop.model.plan import size
from phaseloop.model.weights import open_weights

from .errors import UserError
from .flags_device import DEVICES_MAX, proportions
from .inspect_facts import CACHES, SLOTS_DEFAULT, Devices, Facts, facts_of
from .models import resolve

HELP = "show what a GGUF file holds, the memory it takes, and whether it can be served"
EXIT_UNSERVABLE = 1
CONTEXT_MAX = 1 << 26
SLOTS_MAX = 4096
PLAIN_WIDTH = 100
SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(MiB|GiB|MB|GB)")
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = f"Exit code 0: it can be served; {EXIT_UNSERVABLE}: it cannot; 2: it is broken."
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or a pulled name")
    parser.add_argument(
        "-c", "--ctx-size", type=upto(CONTEXT_MAX), metavar="N",
        help="plan memory for so many tokens of all sequences; by default the trained context",
    )  # fmt: skip
    parser.add_argument(
        "-np", "--parallel", type=upto(SLOTS_MAX), default=SLOTS_DEFAULT, metavar="N",
        help=f"for so many slots; by default {SLOTS_DEFAULT}",
    )  # fmt: skip
    parser.add_argument(
        "--cache-type", choices=CACHES, default="f16", help="of keys and values; by default f16"
    )
    parser.add_argument(
        "-ts", "--tensor-split", type=split, metavar="N,N,..",
        help="plan for several GPUs, the layers shared out in these proportions",
    )  # fmt: skip
    parser.add_argument(
        "--device-memory", type=memories, metavar="SIZE,..",
        help="of each GPU, as 16GiB; one size stands for all; without it nothing is refused",
    )  # fmt: skip
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")


def upto(high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= high:
            raise ArgumentTypeError(f"{text!r} is not an integer from 1 to {high}")
        return int(text)

    return number


def split(text: str) -> tuple[float, ...]:
    try:
        return proportions(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None


def memories(text: str) -> tuple[int, ...]:
    found = [SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if len(found) > DEVICES_MAX or None in found:
        raise ArgumentTypeError(f"{text!r} is no size like 16GiB, or a list of them")
    return tuple(round(float(one[1]) * UNITS[one[2]]) for one in found if one is not None)


def devices_of(args: Namespace) -> Devices | None:
    """Raises UserError where the two flags do not go together."""
    split: tuple[float, ...] | None = args.tensor_split
    memory: tuple[int, ...] | None = args.device_memory
    if split is None and memory is None:
        return None
    if split is None:
        split = (1.0,) * len(memory or ())
    if memory is not None and len(memory) == 1:
        memory *= len(split)
    if memory is not None and len(memory) != len(split):
        raise UserError(
            f"--device-memory names {len(memory)} GPUs and --tensor-split {len(split)}: "
            "give one size, or one for each"
        )
    return Devices(split, memory)


def run(args: Namespace) -> int:
    """Raises UserError for a file that is not there, or is broken."""
    devices = devices_of(args)
    path = resolve(args.model)
    try:
        weights = open_weights(path)
    except ModelError as error:
        raise UserError(str(error)) from None
    facts = facts_of(weights, args.ctx_size, args.parallel, args.cache_type, devices)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n")
    else:
        show(facts, with_tensors=args.tensors)
    return 0 if facts.is_servable else EXIT_UNSERVABLE


# --- for people -----------------------------------------------------------------------------------


def show(facts: Facts, *, with_tensors: bool) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines(facts):
        table.add_row(name, printable(text))
    console.print(table)
    if with_tensors:
        listing = Table("tensor", "type", "shape", "bytes")
        for tensor in facts.tensors:
            shape = " x ".join(map(str, tensor.shape))
            listing.add_row(printable(tensor.name), tensor.kind, shape, f"{tensor.size_bytes:,}")
        console.print(listing)


def lines(facts: Facts) -> list[tuple[str, str]]:
    mix = ", ".join(
        f"{one.kind} {one.size_bytes / facts.size_bytes:.0%} ({one.tensors})" for one in facts.mix
    )
    found = [
        ("file", f"{facts.path} ({size(facts.size_bytes)} of weights)"),
        ("name", facts.name or "-"),
        ("architecture", facts.architecture or "-"),
        ("parameters", f"{facts.parameters:,}"),
        ("weights", f"{mix}; {facts.bits_per_weight:.2f} bits per weight"),
    ]
    found += shape_lines(facts) + text_lines(facts) + memory_lines(facts)
    verdict = "yes" if facts.is_servable else "no"
    found.append(("can be served", verdict))
    found += [("" if index else "because", text) for index, text in enumerate(facts.obstacles)]
    found += [("" if index else "note", text) for index, text in enumerate(facts.notes)]
    return found


def shape_lines(facts: Facts) -> list[tuple[str, str]]:
    shape = facts.shape
    known = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in shape.items())
    return [("shape", known)] if known else []


def text_lines(facts: Facts) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if (words := facts.tokenizer) is not None:
        special = ", ".join(f"{name} {token!r}" for name, token in words.special.items())
        adds = "; a beginning is added" if words.adds_beginning else ""
        found.append(("tokenizer", f"{words.model} ({words.pre}), {words.tokens:,} tokens{adds}"))
        found.append(("special tokens", special or "none"))
    if facts.template is not None:
        able = [name.replace("_", " ") for name, is_able in facts.template.items() if is_able]
        found.append(("chat template", ", ".join(able) or "plain"))
    return found


def memory_lines(facts: Facts) -> list[tuple[str, str]]:
    memory = facts.memory
    if memory is None:
        return []
    found = [("memory", f"{memory.slots} slots: {memory.described}")]
    if not memory.fits:
        most = memory.context_that_fits
        found.append(("", f"does not fit here; -c {most} would" if most else "does not fit here"))
    for index, device in enumerate(facts.devices):
        found.append((f"GPU {index}", device.described))
    return found


def printable(text: str) -> str:
    """What a file says must not command the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
