"""Goal: no interleaving makes a wrong answer of a model with recurrent states, with drafts or not.

Method: the model whose keys and values are its tokens also has a state: a checksum of all cells
before it, kept by the real bookkeeping of states.  A pass that begins at another state than that of
its first row is an error at once, and a wrong token at the end.  Slots, snapshots, forks, saves and
rejected drafts all move such states about.
"""

import random
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from recall import RecallBackend, Shell, recall_engine
from test_snapshots import answer, wander

from phaseloop.core.policy import PRESETS
from phaseloop.ops.delta_states import States
from phaseloop.ops.interface import Recurrence, Snapshot
from phaseloop.ops.passes import cut
from phaseloop.runtime.prefixes import PrefixIndex

SHAPE = Recurrence(layer_count=1, key_heads=1, value_heads=1, width=1, kernel=2)


class HybridRecall(RecallBackend):
    """As RecallBackend; what a region's state is of is looked at before every pass."""

    def __init__(self, regions, capacity, **options):
        super().__init__(regions, capacity, **options)
        self._states = States(SHAPE, np.float32, region_count=regions)
        self.state_bytes = self._states.state_bytes

    def positions(self, region):
        return self._states.positions(region)

    def forward(self, spans):
        legs = self._states.begin(spans)
        for span in spans:
            found = self._states.matrices[0][legs[span.region].read]
            assert found == self._sum(span.region, span.start), "a state of another text"
        logits = super().forward(spans)
        for one in cut(spans, 10_000, apart=False):
            for piece in one.pieces:
                end = piece.start + len(piece.tokens)
                written = legs[piece.region].write
                self._states.matrices[0][written] = self._sum(piece.region, end)
            self._states.passed(legs, one.pieces)
        self._states.commit(legs)
        return logits

    def _sum(self, region, length):
        """A number that the float32 of a state holds exactly; 0 before any token."""
        return zlib.crc32(self._cells[region, :length].tobytes()) & 0xFFFF if length else 0

    def truncate(self, region, length):
        super().truncate(region, length)
        self._states.truncate(region, length)

    def copy(self, source, target, length):
        super().copy(source, target, length)
        self._states.restore(target, self._states.save(source, length), length)

    def save(self, region, length):
        parts = super().save(region, length).parts
        return Snapshot(length, parts, self._states.save(region, length))

    def restore(self, region, snapshot):
        super().restore(region, snapshot)
        self._states.restore(region, snapshot.states or (), snapshot.length)


class HybridShell(Shell):
    """Contexts are not shifted, and prefixes are taken up where there are states."""

    def __init__(self, engine, policy, **limits):
        super().__init__(engine, policy, **limits)
        self.index = PrefixIndex(
            self.state.limits, engine.describe(), engine.snapshots, positions=engine.positions
        )

    def arrive(self, *prompts, **fields):
        fields["shift_keep"] = None
        return super().arrive(*prompts, **fields)


@settings(max_examples=150)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(PRESETS)),
    st.booleans(),
    st.sampled_from([0, 700, 5000]),
    st.sampled_from([(None, False), (2, False), (3, True)]),
    st.sampled_from(["nobody", "right", "wrong", "hybrid"]),
)
def test_no_interleaving_makes_a_wrong_answer(
    seed, policy, reuse_generated, ram_bytes, memory, drafts
):
    source, (pages, save_idle) = random.Random(seed), memory
    failures = source.choice((0, 6))
    kind = HybridRecall if drafts == "hybrid" else RecallBackend
    drafter = kind(3, 256, like_prompt=reuse_generated == (drafts != "wrong"))
    engine, backend = recall_engine(
        slots=3,
        context=256,
        kind=HybridRecall,
        drafter=None if drafts == "nobody" else drafter,
        reuse_generated=reuse_generated,
        ram_bytes=ram_bytes,
        pages=pages,
    )
    served = HybridShell(
        engine,
        policy,
        batch_tokens=source.choice((8, 33, 64)),
        output_reserve=8,
        share_length_min=source.choice((8, 1024)),
        save_idle=save_idle,
    )
    wander(served, backend, drafter, source, failures)
    for (request_id, _), ids in served.given.items():
        prompt = served.prompts[request_id]
        assert ids == answer(prompt, len(ids), like_prompt=reuse_generated)
    assert failures or "failed" not in served.ended.values()
