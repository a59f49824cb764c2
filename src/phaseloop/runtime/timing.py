"""Where the time of one request went, waiting told apart from work (H4 of the reference).

    arrived -- queue --> seated -- prefill --> ready -- barrier --> opened -- decode --> ended

Prefill and decode are spans; what the engine worked on the request in them is the sum of the rounds
that carried one of its rows, each counted whole however many others shared it.
"""


class Timing:
    """One request's; times are `at_ns` of the loop's clock, None for what has not happened.

    With several choices `seated` and `ready` are those of the first, which computes the prompt.
    """

    __slots__ = (
        "accepted",
        "arrived_ns",
        "begun_ns",
        "cached",
        "decode_work_ns",
        "drafted",
        "drafted_last",
        "ended_ns",
        "first_ns",
        "generated",
        "opened_ns",
        "prefill_work_ns",
        "processed",
        "ready_ns",
        "seated_ns",
        "slots",
    )

    def __init__(self) -> None:
        self.arrived_ns: int | None = None
        self.seated_ns: int | None = None
        self.begun_ns: int | None = None  # the first round with a row of it was launched
        self.ready_ns: int | None = None  # its prompt is done
        self.opened_ns: int | None = None  # the round of its first token was launched
        self.first_ns: int | None = None  # that round's end: the first token was delivered
        self.ended_ns: int | None = None  # or its client left
        self.prefill_work_ns = 0
        self.decode_work_ns = 0
        self.cached = 0  # prompt tokens found in place, restored, or forked from another request
        self.processed = 0  # prompt tokens it computed itself
        self.drafted = 0  # tokens that were guessed and verified, of all choices
        self.accepted = 0  # of these, those that were right
        self.drafted_last: dict[int, int] = {}  # by choice: of its last decode round
        self.generated = 0  # tokens put into its outbox, of all choices
        self.slots: dict[int, int] = {}  # by choice

    def queue_ns(self) -> int:
        return self._span(self.arrived_ns, self.seated_ns)

    def prefill_ns(self) -> int:
        return self._span(self.seated_ns, self.ready_ns)

    def barrier_ns(self) -> int:
        return self._span(self.ready_ns, self.opened_ns)

    def decode_ns(self) -> int:
        return self._span(self.opened_ns, self.ended_ns)

    def _span(self, start_ns: int | None, end_ns: int | None) -> int:
        """Zero for what never began; to the request's end for what never ended."""
        if end_ns is None:
            end_ns = self.ended_ns
        return 0 if start_ns is None or end_ns is None else end_ns - start_ns
