"""Multi-token prediction of the Qwen 3.5 family: the block behind the layers, which drafts."""

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import FINAL, Ops, Tensor

from .draft import Draft
from .qwen35 import Layer, gated_attention, layer_of, through
from .qwen35_file import Hybrid, block_name, expect_draft_blocks, read_hybrid
from .shape import EMBEDDING, OUTPUT_NORM, ROPE_FACTORS, dimensions_of, expect_ends, head_of
from .weights import Weights


class DraftBlock(Struct, frozen=True):
    """From a token, and the final row of the token before it, to the next token.

    The final row is the model's; where the block goes on from its own draft, its own.
    """

    layer: Layer
    epsilon: float
    embedding: str
    token_norm: str
    hidden_norm: str
    joint: str
    norm: str
    head: str

    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        hidden = ops.given()
        assert hidden is not None, "every token has a row of the model's beside it"
        token = ops.rms_norm(ops.embed(self.embedding), self.token_norm, self.epsilon)
        hidden = ops.rms_norm(hidden, self.hidden_norm, self.epsilon)
        x = ops.linear(self.joint, ops.join(token, hidden))
        x = through(ops, x, self.layer, self.epsilon, is_last=True)
        return ops.linear(self.head, ops.final(ops.rms_norm(x, self.norm, self.epsilon)))


def draft_of_model(weights: Weights, architecture: str) -> Draft | None:
    """The block of a file that holds a model, too; None if there is none.  It has been checked."""
    hybrid = read_hybrid(weights, architecture)
    return draft_block(weights, hybrid) if hybrid.draft_blocks else None


def draft_of_file(weights: Weights, architecture: str) -> Draft:
    """Of a file that has only the block.  Raises ModelError where it is not as it should be."""
    hybrid = read_hybrid(weights, architecture)
    weights.check(expect_ends(hybrid.shape, hybrid.rope) | expect_draft_blocks(weights, hybrid))
    return draft_block(weights, hybrid)


def draft_block(weights: Weights, hybrid: Hybrid) -> Draft:
    """Of several blocks the first: its own rows lead it on."""
    shape, index = hybrid.shape, hybrid.shape.layer_count
    attention = gated_attention(weights, hybrid, index, 0, hybrid.rope)

    def own(part: str, default: str) -> str:
        name = block_name(index, f"nextn.{part}")
        return name if name in weights.tensors else default

    network = DraftBlock(
        layer=layer_of(weights, hybrid, index, attention),
        epsilon=shape.epsilon,
        embedding=own("embed_tokens", EMBEDDING),
        token_norm=block_name(index, "nextn.enorm"),
        hidden_norm=block_name(index, "nextn.hnorm"),
        joint=block_name(index, "nextn.eh_proj"),
        norm=own("shared_head_norm", OUTPUT_NORM),
        head=own("shared_head_head", head_of(weights)),
    )
    ends = (network.embedding, network.norm, network.head, ROPE_FACTORS)
    return Draft(
        kind="draft-mtp",
        network=network,
        dimensions=replace(dimensions_of(shape, (hybrid.rope,)), given_width=shape.width),
        tensors={
            name: weight
            for name, weight in weights.tensors.items()
            if name in ends or name.startswith(f"blk.{index}.")
        },
        taps=(FINAL,),
    )
