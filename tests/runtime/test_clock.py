"""Goal: virtual time is exact, ordered and never goes back; real time starts at zero.

Method: schedule, cancel and pop; a scripted source in place of the machine's clock.
"""

import pytest

from phaseloop.core.vocabulary import ShutdownRequested
from phaseloop.runtime.clock import AsyncioClock, VirtualClock


def test_real_time_starts_at_zero():
    readings = iter([500, 500, 507])
    clock = AsyncioClock(lambda: next(readings))
    assert [clock.now_ns(), clock.now_ns()] == [0, 7]


def test_items_come_by_time_then_by_order_of_scheduling():
    clock = VirtualClock()
    seen: list[str] = []
    for at_ns, name in ((5, "b"), (3, "a"), (5, "c"), (5, "d")):
        clock.call_at(at_ns, lambda name=name: seen.append(name))
    times = []
    while clock.next_ns() is not None:
        clock.pop()()
        times.append(clock.now_ns())
    assert (seen, times) == (["a", "b", "c", "d"], [3, 5, 5, 5])


def test_an_event_comes_at_its_own_time():
    clock = VirtualClock()
    event = ShutdownRequested(at_ns=9)
    clock.post(event)
    assert clock.next_ns() == 9
    assert clock.pop() is event
    assert clock.now_ns() == 9


def test_cancelled_items_never_come_wherever_they_stand():
    for gone in range(4):
        clock = VirtualClock()
        tickets = [clock.post(ShutdownRequested(at_ns=at_ns)) for at_ns in range(4)]
        clock.cancel(tickets[gone])
        left = []
        while clock.next_ns() is not None:
            left.append(clock.pop().at_ns)
        assert left == [at_ns for at_ns in range(4) if at_ns != gone]


def test_the_past_takes_nothing():
    clock = VirtualClock()
    clock.advance(10)
    with pytest.raises(AssertionError, match="9 ns is past"):
        clock.post(ShutdownRequested(at_ns=9))
    with pytest.raises(AssertionError, match="9 ns is past"):
        clock.advance(9)
    clock.post(ShutdownRequested(at_ns=10))
