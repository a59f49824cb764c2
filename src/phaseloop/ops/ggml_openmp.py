"""ggml, loaded after its threads have been told how long to spin.

At the end of every op the threads wait for each other, hundreds of times in a pass.  Waking one
that sleeps takes longer than most ops, so they must spin; but OpenMP spins for some 16 ms if nobody
says otherwise, and where another process wants the core, that is time which the thread that is
waited for does not get.  Measured with two threads on two cores that others used as well: a decode
pass of 36 ms took up to 750 ms, and as many turns as are asked for here, half a millisecond of
them, made that 74 ms; alone on the machine both take the same.
"""

import os

SPIN_TURNS = 10_000

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_TURNS)  # read once, when OpenMP is loaded
# When ggml gives up it would have a debugger print its stack, and could wait for it for ever.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import ggml  # noqa: E402

__all__ = ["ggml"]
