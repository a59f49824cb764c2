"""Who is measured: a phaseloop server under one of its policies, or another server by its address.

A server with llama-server's routes is asked through /completion, which tells tokens and timings;
any other through OpenAI's /v1/completions.
"""

import asyncio
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .client import Address, ClientError, Exchange
from .errors import UserError

Protocol = Literal["native", "openai"]
IDLE_INTERVAL_S = 0.02
IDLE_S_MAX = 30.0
SWITCH_S_MAX = 30.0
SHOWN_BYTES = 80  # of an answer that was not expected
EXCLUSIVE_BUT = ("mixed",)  # the policy whose rounds may mix


class Server(Struct, frozen=True):
    """A process that answers, whatever policies it is measured under."""

    name: str
    address: Address
    api_key: str | None
    protocol: Protocol
    model: str  # for OpenAI's `model` member

    async def get(self, route: str) -> tuple[int, bytes]:
        async with Exchange(self.address, "GET", route, api_key=self.api_key) as answer:
            return answer.status, await answer.body()

    async def send(self, method: str, route: str, body: object) -> Any:  # noqa: ANN401  JSON
        """Raises ClientError with what the server says if it refuses."""
        exchange = Exchange(self.address, method, route, body, api_key=self.api_key)
        async with exchange as answer:
            data = await answer.body()
            if answer.status != 200:
                raise ClientError(f"{self.name}: {method} {route}: {refusal(answer.status, data)}")
            return decoded(self.name, data)


class Target(Struct, frozen=True):
    """One column of the comparison."""

    name: str
    server: Server
    policy: dict[str, Any] | None = None  # the body of PUT /phase; None for other servers

    @property
    def is_exclusive(self) -> bool:
        return self.policy is not None and self.policy["policy"] not in EXCLUSIVE_BUT


def refusal(status: int, body: bytes) -> str:
    """The message of an error answer, whoever's it is."""
    try:
        error = msgspec.json.decode(body)["error"]
        return f"{status}: {error['message'] if isinstance(error, dict) else error}"[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"


def decoded(name: str, data: bytes) -> Any:  # noqa: ANN401  JSON
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise ClientError(f"{name}: the answer is no JSON: {data[:80]!r}") from None


# --- who is there ---------------------------------------------------------------------------------


async def find_server(name: str, url: str, api_key: str | None, *, given: str) -> Server:
    """Raises UserError, which begins with what was `given`, for who is not there, or is no such."""
    try:
        address = Address.parse(url)
        probe = Server(name, address, api_key, "native", "")
        status, body = await probe.get("/props")
        if status == 200 and is_llama_like(body):
            return probe
        status, body = await probe.get("/v1/models")
    except ClientError as error:
        raise UserError(f"{given}: {error}") from None
    came = refusal(status, body)
    if status == 200:
        try:
            return Server(name, address, api_key, "openai", first_model(body))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
            came = f"200 with what is no list of models: {shown(body)}"
    raise UserError(
        f"{given}: the URL of a phaseloop, a llama-server or an OpenAI compatible server is "
        f"expected; GET /v1/models answered {came}"
    )


def is_llama_like(body: bytes) -> bool:
    try:
        return "default_generation_settings" in msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        return False


def shown(body: bytes) -> str:
    """The beginning of what somebody else has sent, on one line."""
    text = " ".join(body[:SHOWN_BYTES].decode(errors="replace").split())
    return repr(text) if text else "nothing"


def first_model(body: bytes) -> str:
    return str(msgspec.json.decode(body)["data"][0]["id"])


# --- before a run ---------------------------------------------------------------------------------


async def prepare(target: Target) -> None:
    """The policy is in force and nobody is being answered.  Raises ClientError."""
    await until_idle(target.server)
    if target.policy is not None:
        # PUT keeps what is not stated of the policy in force, so another one comes between.
        wanted = target.policy["policy"]
        await switch(target.server, {"policy": "barrier-fair" if wanted == "mixed" else "mixed"})
        await switch(target.server, target.policy)


async def switch(server: Server, policy: dict[str, Any]) -> None:
    await server.send("PUT", "/phase", policy)
    try:
        async with asyncio.timeout(SWITCH_S_MAX):
            # Another process: there is no event to wait for.
            while (  # noqa: ASYNC110
                now := await server.send("GET", "/phase", None)
            )["pending"] is not None:
                await asyncio.sleep(IDLE_INTERVAL_S)
    except TimeoutError:
        raise ClientError(f"{server.name}: {policy['policy']} never came into force") from None
    if now["policy"] != policy["policy"]:
        raise ClientError(f"{server.name}: {now['policy']} is in force, not {policy['policy']}")


async def until_idle(server: Server) -> None:
    """Every slot is empty; at once where the server does not show its slots."""
    try:
        async with asyncio.timeout(IDLE_S_MAX):
            while await is_busy(server):  # noqa: ASYNC110  as above
                await asyncio.sleep(IDLE_INTERVAL_S)
    except TimeoutError:
        raise ClientError(
            f"{server.name}: somebody else uses it, or it never came to rest"
        ) from None


async def is_busy(server: Server) -> bool:
    if server.protocol == "openai":
        return False
    status, body = await server.get("/slots")
    if status != 200:
        return False
    return any(slot.get("is_processing") for slot in decoded(server.name, body))


async def counters(server: Server) -> dict[str, float]:
    """Every unlabelled sample of /metrics; empty where the server shows none."""
    status, body = await server.get("/metrics")
    if status != 200:
        return {}
    lines = (line.rsplit(" ", 1) for line in body.decode(errors="replace").splitlines())
    found: dict[str, float] = {}
    for line in lines:
        if len(line) == 2 and line[0][:1] not in ("#", "") and "{" not in line[0]:
            found[line[0]] = float(line[1])
    return found
