"""`phaseloop bench SUBJECT ...`: measures one part of phaseloop on this machine.

A subject is a module `phaseloop.cli.bench_<name>` that keeps the contract of a command (see
main.py).  Only the module of the subject that was asked for is imported.
"""

from argparse import REMAINDER, ArgumentParser, Namespace

from .main import run_module

HELP = "measure the engine, the policies or the server on this machine"
SUBJECTS = {  # in the order of the help
    "engine": "prompts and answers per second, beside llama.cpp and the machine's limits",
    "policies": "one workload under each policy, and beside other servers: throughput and waits",
    "server": "streams through HTTP: tokens per second, gaps, and the cost of a round",
}


def add_arguments(parser: ArgumentParser) -> None:
    width = max(map(len, SUBJECTS))
    lines = (f"  {name:<{width}}  {text}" for name, text in SUBJECTS.items())
    parser.usage = "phaseloop bench [--help] SUBJECT ..."
    parser.description = "Measures, prints a table, and writes what was measured where asked to."
    parser.epilog = "\n".join(
        ("subjects:", *lines, "", "phaseloop bench SUBJECT --help tells about one subject.")
    )
    parser.add_argument("subject", choices=SUBJECTS, metavar="SUBJECT", help="what to measure")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="...", help="of the subject")


def run(args: Namespace) -> int:
    return run_module(f"bench_{args.subject}", f"phaseloop bench {args.subject}", args.arguments)
