"""Goal: devices copy from their peers only where driver, operator and patterns agree.

Method: the double of CuPy, whose peer copies can change a byte on the way; every reason for which a
pair is refused, and that refused pairs still copy, through the host.
"""

import logging

import numpy as np
import pytest
from cupy_double import Machine

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.cupy_device import CupyDevice
from phaseloop.kernels.peers import ROUNDS, PeerAccess, connect, parse_peer_access, patterns

SIZE = 1000  # bytes per pattern
EVERY = {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}
ALL = parse_peer_access("all")


def connected(machine, access):
    devices = [CupyDevice(machine, index, staged_bytes=256) for index in range(machine.count)]
    pairs = connect(machine, devices, access, size=SIZE)
    return devices, {(pair.source, pair.target): pair for pair in pairs}


def arrives(devices, source, target):
    content = np.arange(SIZE, dtype=np.uint16)
    begin, end = (devices[one].allocate((SIZE,), np.uint16) for one in (source, target))
    devices[source].upload(content, begin)
    devices[target].copy_from(devices[source], begin, end)
    found = np.empty_like(content)
    devices[target].download(end, found)
    return np.array_equal(found, content)


def test_pairs_that_carry_patterns_are_used():
    machine = Machine(3, reaches=EVERY)
    devices, pairs = connected(machine, ALL)
    assert {pair.state for pair in pairs.values()} == {"used"}
    assert machine.enabled == EVERY
    free = machine.free_bytes[:]
    machine.copies.clear()
    assert arrives(devices, 2, 1)
    assert (2, 1) in machine.copies
    assert free[0] == 1 << 30, "the trial's memory is given back"


def test_patterns_show_bytes_that_are_moved_stuck_or_another_pairs():
    found = list(patterns(4096, 0, 1))
    assert len(found) == 3 * ROUNDS
    (_, counted), (_, inverted), (_, random) = found[:3]
    assert len(set(counted.view(np.uint32).tolist())) == 1024  # no word is like another
    assert np.array_equal(counted ^ inverted, np.full(4096, 0xFF))  # each bit is seen both ways
    assert not np.array_equal(random, found[5][1])  # another one in the next round
    for _, others in list(patterns(4096, 1, 0))[:3]:
        assert not any(np.array_equal(others, mine) for _, mine in found)
    assert {content.nbytes for _, content in patterns(1001, 0, 1)} == {1001}


def test_a_pair_that_corrupts_is_refused_in_that_direction_alone(caplog):
    machine = Machine(2, reaches=EVERY, corrupts={(0, 1)})
    with caplog.at_level(logging.WARNING):
        devices, pairs = connected(machine, ALL)
    assert pairs[0, 1].state == "corrupt"
    assert pairs[0, 1].why == "1 of 1000 bytes arrive changed (counted words, from byte 500)"
    assert pairs[1, 0].state == "used"
    assert machine.enabled == {(1, 0)}
    assert "device 0 to device 1: 1 of 1000 bytes" in caplog.text
    assert arrives(devices, 0, 1)
    assert arrives(devices, 1, 0)


def test_nothing_is_enabled_that_nobody_allowed():
    machine = Machine(3, reaches=EVERY)
    devices, pairs = connected(machine, parse_peer_access("2:1"))
    used = {ends for ends, pair in pairs.items() if pair.state == "used"}
    assert used == {(1, 2), (2, 1)} == machine.enabled
    assert pairs[0, 1].state == "not allowed"
    assert pairs[0, 1].why == "--peer-access 0:1 would allow it"
    assert arrives(devices, 0, 1)
    _, pairs = connected(Machine(2, reaches=EVERY), PeerAccess())
    assert {pair.state for pair in pairs.values()} == {"not allowed"}


def test_what_the_driver_does_not_offer_is_impossible():
    devices, pairs = connected(Machine(2, reaches={(0, 1)}), ALL)
    assert (pairs[0, 1].state, pairs[1, 0].state) == ("used", "impossible")
    assert arrives(devices, 1, 0)


def test_a_trial_that_fails_refuses_the_pair():
    machine = Machine(2, reaches=EVERY, free_bytes=SIZE // 2)
    _, pairs = connected(machine, ALL)
    assert {pair.state for pair in pairs.values()} == {"failed"}
    assert "out of memory" in pairs[0, 1].why


def test_connecting_twice_is_no_error():
    machine = Machine(2, reaches=EVERY)
    connected(machine, ALL)
    _, pairs = connected(machine, ALL)
    assert {pair.state for pair in pairs.values()} == {"used"}


def test_what_is_allowed_can_be_said():
    assert parse_peer_access("none") == PeerAccess()
    assert parse_peer_access("all").allows(3, 0)
    some = parse_peer_access("0:1,3:2")
    assert [some.allows(*pair) for pair in ((0, 1), (1, 0), (2, 3), (1, 2))] == [True] * 3 + [False]
    for text in ("", "0", "0-1", "0:1,", "a:b", "0:1;2:3", "ALL", "-1:0"):
        with pytest.raises(KernelError, match="neither all, none, nor pairs"):
            parse_peer_access(text)
    with pytest.raises(KernelError, match="1:1: a device is no peer of itself"):
        parse_peer_access("0:1,1:1")
    with pytest.raises(KernelError, match=r"peer access for device 5; there are \[0, 1\]"):
        connected(Machine(2, reaches=EVERY), parse_peer_access("0:5"))
