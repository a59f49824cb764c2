"""`phaseloop demo`: from nothing to an answer of a real model, in one command."""

import argparse
import sys

import msgspec

from .child import ChildServer
from .client import ClientError, Exchange
from .ending_async import run_async
from .errors import UserError
from .pull import fetch

HELP = "fetch a small model, serve it, and show one streamed answer"
MODEL = "smollm2-135m"
QUESTION = "What is the difference between a prompt and an answer? Two sentences."
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", default=QUESTION, help="what to ask the model")
    parser.add_argument(
        "-m", "--model", default=MODEL, help=f"a path or a pulled name (default: {MODEL})"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=120, metavar="N", help="of the answer (default: 120)"
    )


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: at least one token is needed")
    if args.model == MODEL:
        fetch(MODEL)
    try:
        return run_async(ask(args.model, args.question, args.max_tokens))
    except ClientError as error:
        raise UserError(str(error)) from None


async def ask(model: str, question: str, max_tokens: int) -> int:
    async with ChildServer(["-m", model], echo=True) as server:
        address = server.address
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        say(f"\n> curl -N http://{address.host}:{address.port}/v1/chat/completions \\")
        say(f"    -H 'Content-Type: application/json' -d '{msgspec.json.encode(body).decode()}'\n")
        async with Exchange(address, "POST", "/v1/chat/completions", body) as answer:
            if answer.status != 200:
                say((await answer.body()).decode(errors="replace"))
                return EXIT_FAILED
            return await show(answer)


async def show(answer: Exchange) -> int:
    """Print the text as it comes, then the figures of the last chunk."""
    last: dict[str, object] = {}
    async for event in answer.events():
        if event.data == b"[DONE]":
            break
        chunk = msgspec.json.decode(event.data)
        if "error" in chunk:
            say(f"\n{chunk['error'].get('message', chunk['error'])}")
            return EXIT_FAILED
        for choice in chunk["choices"]:
            sys.stdout.write(choice["delta"].get("content") or "")
            sys.stdout.flush()
        last = chunk.get("timings", last)
    say("\n\n" + figures(last))
    return 0


def figures(timings: dict[str, object]) -> str:
    wanted = ("prompt_n", "prompt_per_second", "predicted_n", "predicted_per_second")
    if any(name not in timings for name in wanted):
        return "The server sent no timings."
    prompt_n, prompt_rate, predicted_n, predicted_rate = (timings[name] for name in wanted)
    return (
        f"{prompt_n} prompt tokens at {prompt_rate:.0f} tokens/s, "
        f"{predicted_n} generated at {predicted_rate:.0f} tokens/s"
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
