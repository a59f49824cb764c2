"""Goal: the sampler's random numbers are Philox's, uniform, and a function of what they are for.

Method: the known answers that the Random123 library publishes (its kat_vectors, philox4x32 with 10
rounds), and frequencies over fixed keys.
"""

import pytest

from phaseloop.engine.sampling_random import philox, uniform

ONES = 0xFFFFFFFF
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
CHI_SQUARE_999 = {9: 27.88, 99: 148.2}  # by degrees of freedom: exceeded once in a thousand


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox(counter, key) == words


def test_a_number_is_made_of_the_first_two_words():
    """Seed 0, choice 0, position 0, draw 0 is the first known answer."""
    words = (0x6627E8D5 << 32) | 0xE169C58D
    assert uniform(0, 0, 0, 0) == pytest.approx(words / 2**64, abs=2**-27)
    assert uniform(0, 0, 0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_whatever_it_is_for_counts():
    key = {"seed": 7, "choice": 1, "position": 5, "number": 2}
    changes = [{"seed": 8}, {"seed": 7 + (1 << 32)}, {"seed": 7 + (1 << 63)}]
    changes += [{"choice": 2}, {"position": 6}, {"number": 3}]
    numbers = [uniform(**(key | change)) for change in [{}, *changes]]
    assert len(set(numbers)) == len(numbers)


def chi_square(numbers, cells):
    expected = len(numbers) / cells
    counts = [0] * cells
    for number in numbers:
        counts[int(number * cells)] += 1
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("over", ["seed", "choice", "position", "number"])
def test_numbers_are_uniform(over):
    key = {"seed": 2024, "choice": 0, "position": 17, "number": 0}
    numbers = [uniform(**(key | {over: value})) for value in range(5000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert chi_square(numbers, 10) < CHI_SQUARE_999[9]


def test_neighbours_are_unrelated():
    """Pairs of draws at one position, and of one draw at positions that follow each other."""
    for other in ({"number": 1}, {"position": 1}):
        pairs = []
        for seed in range(5000):
            first = uniform(**{"seed": seed, "choice": 0, "position": 0, "number": 0})
            second = uniform(**({"seed": seed, "choice": 0, "position": 0, "number": 0} | other))
            pairs.append((int(first * 10) + int(second * 10) / 10) / 10)
        assert chi_square([pair + 1e-9 for pair in pairs], 100) < CHI_SQUARE_999[99]
