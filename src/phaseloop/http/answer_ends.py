"""How a request's end looks to its client.

| end | answer | status before the stream has begun |
|---|---|---|
| `stop`, `length`, `no_space` | complete; the last two with finish_reason `length` | 200 |
| `exceeds_context` | exceed_context_size_error | 400 |
| `exceeds_slots`, `exceeds_memory`, `invalid` | invalid_request_error | 400 |
| `queue_full`, `queue_timeout`, `shutdown` | unavailable_error | 503, with Retry-After |
| `deadline`, `stalled`, `cancelled`, `engine_lost` | unavailable_error | 503 |
| `failed` | server_error | 500 |

Once a stream has begun, an error is its last event, and no `[DONE]` follows.  An answer of several
choices or prompts is complete or an error as a whole.
"""

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import FinishReason, Request

from .errors import ApiError, invalid, unavailable
from .request_prompt import exceeds_context

COMPLETE: tuple[FinishReason, ...] = ("stop", "length", "no_space")
RETRY_QUEUE_S = 1
RETRY_SHUTDOWN_S = 5
MS = 1_000_000


def failure(reason: FinishReason, request: Request, limits: Limits) -> ApiError:
    """The error that an end other than those of COMPLETE is."""
    match reason:
        case "exceeds_context":
            return exceeds_context(request.prompt_length, limits.context_length)
        case "exceeds_memory":
            tokens = limits.page_count * limits.page_length
            return invalid(
                f"prompt and answer need more memory than the {tokens} tokens of the whole server;"
                " ask for fewer tokens or choices"
            )
        case "exceeds_slots":
            return invalid(
                f"n: {request.choices} choices need as many slots,"
                f" and this server has {limits.slot_count}"
            )
        case "queue_full":
            message = f"{limits.queue_length_max} requests wait already (--max-queued); try later"
            return unavailable(message, retry_after_s=RETRY_QUEUE_S)
        case "queue_timeout":
            waited_ms = (request.queue_wait_ns_max or 0) // MS
            message = f"no slot was free within {waited_ms} ms"
            return unavailable(message, retry_after_s=RETRY_QUEUE_S)
        case "shutdown":
            return unavailable("the server is shutting down", retry_after_s=RETRY_SHUTDOWN_S)
        case "deadline":
            given_ms = (request.deadline_after_ns or 0) // MS
            return unavailable(f"the request's deadline of {given_ms} ms has passed")
        case "stalled":
            stall_s = limits.client_stall_ns / 1e9
            return unavailable(f"nobody read the answer for {stall_s:g} s (--client-stall-ms)")
        case "cancelled":
            return unavailable("the request was cancelled")
        case "engine_lost":
            return unavailable("the engine is lost, and the server ends")
        case "failed":
            return ApiError("server_error", "the engine failed on this request; others go on")
        case _:
            return invalid(f"the scheduler refused the request as {reason}")
