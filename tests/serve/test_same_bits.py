"""Goal: over HTTP, an answer has the same tokens and likelihoods however it is asked for.

Method: SmolLM2 behind a real server; one request alone and whole is the measure for the same one
streamed, repeated from the cache, without it, and among neighbours of whom one hangs up.  What
policies, batch sizes and threads change (nothing) is tests/engine/test_p3_smollm2.py's matter.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phaseloop.cli.child import ChildServer
from phaseloop.cli.client import Exchange

TOKENS = 24
REQUEST = {
    "prompt": "The lighthouse keeper wrote in the log: on the third night of the storm",
    "n_predict": TOKENS,
    "seed": 7,
    "temperature": 0.9,
    "n_probs": 3,
    "return_tokens": True,
}
NEIGHBOURS = ("Salt is", "A recipe for bread in five steps:\n1.", "def fibonacci(n):\n    ")

Bits = tuple[list[int], list[Any]]  # token ids, and what is told of each one's likelihood


async def whole(server: ChildServer, **fields: Any) -> Bits:
    async with Exchange(server.address, "POST", "/completion", REQUEST | fields) as answer:
        body = msgspec.json.decode(await answer.body())
    assert answer.status == 200, body
    return body["tokens"], body["completion_probabilities"]


async def streamed(server: ChildServer, **fields: Any) -> Bits:
    tokens: list[int] = []
    likelihoods: list[Any] = []
    fields = REQUEST | {"stream": True} | fields
    async with Exchange(server.address, "POST", "/completion", fields) as answer:
        async for event in answer.events():
            chunk = msgspec.json.decode(event.data)
            if not chunk["stop"]:
                tokens += chunk["tokens"]
                likelihoods += chunk["completion_probabilities"]
    return tokens, likelihoods


async def leave_early(server: ChildServer) -> None:
    fields = REQUEST | {"prompt": "Once upon a time", "n_predict": 200, "stream": True}
    async with Exchange(server.address, "POST", "/completion", fields) as answer:
        async for _ in answer.events():
            break


async def in_company(server: ChildServer, **fields: Any) -> Bits:
    others = [whole(server, prompt=prompt, seed=1, ignore_eos=True) for prompt in NEIGHBOURS]
    answers = await asyncio.gather(streamed(server, **fields), leave_early(server), *others)
    return answers[0]


@pytest.mark.timeout(300)
def test_streamed_cached_and_in_company(smollm2: Path):
    async def main() -> dict[str, Bits]:
        async with ChildServer(["-m", str(smollm2), "--parallel", "4"]) as server:
            return {
                "alone and whole": await whole(server, cache_prompt=False),
                "streamed": await streamed(server, cache_prompt=False),
                "from the cache": await whole(server),
                "in company": await in_company(server),
                "in company, cold": await in_company(server, cache_prompt=False),
            }

    answers = asyncio.run(main())
    tokens, likelihoods = answers["alone and whole"]
    assert len(tokens) == len(likelihoods) == TOKENS
    for how, bits in answers.items():
        assert bits == (tokens, likelihoods), f"{how}: other tokens or likelihoods"
