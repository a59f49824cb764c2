"""Random numbers of a sampler: Philox4x32-10, a block cipher over counters.

A number depends on what it is for and on nothing else: not on how many were drawn before it, nor on
who shares the round.  So a request repeats its answer in any company.  The generator is that of
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

Words4 = tuple[int, int, int, int]


def philox(counter: Words4, key: tuple[int, int]) -> Words4:
    """The four words of 32 bits that belong to a counter under a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & WORD,
            (first >> 32) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, number: int) -> float:
    """A number in [0, 1), with the 53 bits that a float can hold.

    The seed, 64 bits, is the key.  The counter has the token's position, the number of the draw at
    that position, and the choice, 32 bits each; two that differ in any of them are unrelated.
    """
    counter = (position & WORD, number & WORD, choice & WORD, 0)
    high, low, _, _ = philox(counter, (seed & WORD, (seed >> 32) & WORD))
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)
