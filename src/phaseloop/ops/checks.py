"""What every backend refuses before it computes."""

from collections.abc import Sequence

from .interface import BackendError, Dimensions, Span


def check_spans(
    spans: Sequence[Span],
    dimensions: Dimensions,
    region_count: int,
    capacity: int,
    adapter_count: int = 0,
) -> None:
    """Raises BackendError unless every lane fits its region and every token the vocabulary.

    And unless all have one list of adapters, each of them loaded and named once.
    """
    if not spans:
        raise BackendError("a pass needs at least one lane")
    if any(span.adapters != spans[0].adapters for span in spans):
        raise BackendError("two lanes of one pass have different adapters")
    named = [adapter for adapter, _ in spans[0].adapters]
    if named != sorted(set(named) & set(range(adapter_count))):
        raise BackendError(f"adapters {named} of {adapter_count} that are loaded")
    if len({span.given is None for span in spans}) > 1:
        raise BackendError("rows come along with some lanes of a pass, with others none")
    if len({span.region for span in spans}) != len(spans):
        raise BackendError("two lanes of one pass share a KV region")
    for lane, span in enumerate(spans):
        count = len(span.tokens)
        if not 0 <= span.region < region_count:
            raise BackendError(f"lane {lane}: KV region {span.region} of {region_count}")
        if count < 1 or not 0 <= span.outputs <= count:
            raise BackendError(f"lane {lane}: {span.outputs} outputs of {count} tokens")
        if span.given is not None and span.given.shape != (count, dimensions.given_width):
            raise BackendError(
                f"lane {lane}: {list(span.given.shape)} rows come along with {count} tokens, the "
                f"network reads rows of {dimensions.given_width}"
            )
        if span.start < 0 or span.start + count > capacity:
            raise BackendError(
                f"lane {lane}: positions {span.start} to {span.start + count} "
                f"in a region of {capacity}"
            )
        if min(span.tokens) < 0 or max(span.tokens) >= dimensions.vocabulary:
            raise BackendError(
                f"lane {lane}: token ids {min(span.tokens)} to {max(span.tokens)}, "
                f"the vocabulary has {dimensions.vocabulary}"
            )


def output_width(dimensions: Dimensions) -> int:
    """Of each row that a network gives."""
    return dimensions.output_width or dimensions.vocabulary


def output_rows(spans: Sequence[Span]) -> list[int]:
    """Rows of the batch whose logits are wanted; its last row if there are none."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += len(span.tokens)
        rows += range(end - span.outputs, end)
    return rows or [end - 1]
