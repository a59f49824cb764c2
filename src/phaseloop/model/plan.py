"""How much memory serving a model takes, said before it is loaded.

    weights   mapped from their file; they count whole, as every token reads them all
    copies    of matrices in the order of ggml's wider kernels, if the CPU and the file's types have
              such; what of the file was copied is seldom read again, but counts all the same
    cache     keys and values, for as many tokens as all sequences may have together; memory is
              taken as tokens come, but a plan that is met only while nobody asks is none
    states    recurrent ones, where the model has some: per slot that of its last token, the one
              before, and the least number that is kept for later prompts
    scratch   one pass: feed-forward rows, masks, logits; and the process itself

All sizes are bytes, contexts are tokens.
"""

from collections.abc import Iterable
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.delta_states import CELLS_PER_REGION, NEWEST_KEPT
from phaseloop.ops.interface import Dimensions

from .shape import Model
from .weights import Weights

PROCESS_BYTES = 150 << 20  # interpreter, libraries, graphs
MASK_BYTES_MAX = 256 << 20  # the backend cuts passes so that masks stay below
STATES_PER_SLOT = CELLS_PER_REGION + NEWEST_KEPT
# Types that ggml repacks on some CPU, and how many times a matrix's bytes its copy takes: Q4_1 gets
# an F32 offset per block of 32 instead of an F16 one.
COPIES = {"Q4_0": 1.0, "Q4_1": 1.1, "IQ4_NL": 1.0, "MXFP4": 1.0, "Q4_K": 1.0, "Q2_K": 1.0}
CONTEXT_STEP = 256  # tokens; the page of the ledger
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


class Plan(Struct, frozen=True):
    weights_bytes: int
    position_bytes: int  # one token of one sequence
    context: int  # tokens of all sequences together
    sequence: int  # tokens of one sequence at most
    scratch_bytes: int
    available_bytes: int | None  # None where nobody knows
    states_bytes: int = 0  # of all slots
    copies_bytes: int = 0
    drafter_bytes: int = 0  # a model that drafts; its cache is in position_bytes
    adapters_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.context * self.position_bytes

    @property
    def total_bytes(self) -> int:
        loaded = self.weights_bytes + self.copies_bytes + self.drafter_bytes + self.adapters_bytes
        return loaded + self.states_bytes + self.scratch_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    def context_that_fits(self) -> int:
        """The largest sum of contexts, in whole pages, that there is memory for; 0 if none."""
        if self.available_bytes is None:
            return self.context
        left = self.available_bytes - (self.total_bytes - self.cache_bytes)
        return max(0, left // self.position_bytes // CONTEXT_STEP * CONTEXT_STEP)

    def describe(self) -> str:
        """One line for people."""
        slot = size(self.sequence * self.position_bytes)
        parts = [
            f"weights {size(self.weights_bytes)}",
            *([f"repacked copies {size(self.copies_bytes)}"] if self.copies_bytes else ()),
            *([f"adapters {size(self.adapters_bytes)}"] if self.adapters_bytes else ()),
            f"KV cache {size(self.cache_bytes)} for {self.context} tokens "
            f"(a slot up to {slot} for {self.sequence})",
            f"scratch {size(self.scratch_bytes)}",
        ]
        if self.states_bytes:
            parts.insert(-1, f"recurrent states {size(self.states_bytes)}")
        if self.drafter_bytes:
            parts.insert(-1, f"draft model {size(self.drafter_bytes)}")
        free = self.available_bytes
        known = "" if free is None else f" of {size(free)} available"
        return f"{', '.join(parts)}: {size(self.total_bytes)}{known}"


def plan_memory(
    weights: Weights,
    model: Model,
    *,
    context: int,
    cache: str,
    slot_count: int,
    ubatch: int,
    available_bytes: int | None,
    repack: bool = False,
    draft_tokens: int = 0,
) -> Plan:
    """`context` is of all sequences together; `cache` the GGML type of keys and values.

    `draft_tokens` are verified at most per slot and pass, each with a row of logits.
    """
    sequence = min(context, model.context_length)
    vocabulary = model.dimensions.vocabulary
    # Those kept, and those of a pass, which it computes and hands over.
    logits_bytes = 2 * 4 * slot_count * (1 + draft_tokens) * vocabulary
    masks_bytes = min(MASK_BYTES_MAX, 4 * ubatch * sequence)
    rows_bytes = 2 * 4 * ubatch * widest(weights, vocabulary)
    return Plan(
        weights_bytes=weights.size_bytes,
        position_bytes=position_bytes(model.dimensions, cache),
        context=context,
        sequence=sequence,
        scratch_bytes=PROCESS_BYTES + logits_bytes + masks_bytes + rows_bytes,
        available_bytes=available_bytes,
        states_bytes=slot_count * STATES_PER_SLOT * state_bytes(model.dimensions),
        copies_bytes=copies_bytes(weights) if repack else 0,
    )


def with_drafter(plan: Plan, drafter: Plan) -> Plan:
    """What a model takes beside another one that drafts for it, whose plan has the same sizes."""
    return replace(
        plan,
        position_bytes=plan.position_bytes + drafter.position_bytes,
        drafter_bytes=drafter.total_bytes - drafter.cache_bytes - PROCESS_BYTES,
    )


def copies_bytes(weights: Weights) -> int:
    """At most: whether a type is repacked is up to the CPU."""
    matrices = (weight for weight in weights.tensors.values() if len(weight.shape) == 2)
    return round(sum(COPIES.get(one.kind, 0.0) * one.data.nbytes for one in matrices))


def position_bytes(dimensions: Dimensions, cache: str) -> int:
    """Keys and values of one token in all layers."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[cache]]
    heads = len(dimensions.ropes) * dimensions.kv_head_count
    widths = (dimensions.key_length, dimensions.value_length)
    return sum(heads * -(-width // block) * block_bytes for width in widths)


def state_bytes(dimensions: Dimensions) -> int:
    """One sequence's recurrent state in all layers, F32; 0 where the model has none."""
    return 0 if dimensions.recurrence is None else 4 * dimensions.recurrence.state_size


def widest(weights: Weights, vocabulary: int) -> int:
    """The longest row that a pass holds, logits apart: as a rule a feed-forward layer's."""
    shapes = (weight.shape for weight in weights.tensors.values())
    return max((s[-2] for s in shapes if len(s) > 1 and s[-2] != vocabulary), default=0)


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """What the machine has to give, or what the control group leaves of it."""
    known = [machine_memory(proc), group_memory(cgroup)]
    return min((amount for amount in known if amount is not None), default=None)


def machine_memory(proc: Path) -> int | None:
    for line in lines_of(proc / "meminfo"):
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) << 10  # it says kB and means KiB
    return None


def group_memory(cgroup: Path) -> int | None:
    """Version 2.  What is cached of files can be given back, so it counts as free."""
    most, used = (
        next(iter(lines_of(cgroup / f"memory.{what}")), "") for what in ("max", "current")
    )
    if not most.isdigit() or not used.isdigit():
        return None  # no limit, or no such file
    files = [line.split() for line in lines_of(cgroup / "memory.stat")]
    spare = sum(int(amount) for name, amount in files if name == "inactive_file")
    return max(0, int(most) - int(used) + spare)


def lines_of(path: Path) -> Iterable[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return ()


def size(count: int) -> str:
    """Bytes as people read them: three digits, binary units."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.3g} {unit}"
