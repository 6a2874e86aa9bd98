"""How a batch is cut into micro-batches. Those of one round are equally large: torch's schedules need that."""

from __future__ import annotations

_EACH = 4  # micro-batches for every rank: a bubble of at most a quarter


def chosen(total: int, ranks: int, stages_each: int = 1) -> int:
    """Near to four for each rank, and such that all are equally large if that is possible."""
    wanted = _EACH * ranks
    dividing = [
        count
        for count in range(ranks, min(total, 2 * wanted) + 1)
        if total % count == 0 and (stages_each == 1 or is_whole(count, ranks))
    ]
    return min(dividing, key=lambda count: (abs(count - wanted), count), default=max(1, min(total, wanted)))


def rounds(total: int, micro_batches: int) -> list[tuple[int, int]]:
    """How many micro-batches of which size; what is left over comes in a smaller one of its own."""
    size = -(-total // max(1, min(total, micro_batches)))
    count, rest = divmod(total, size)
    return [(count, size), *([(1, rest)] if rest else [])]


def is_whole(count: int, ranks: int) -> bool:
    """Torch's interleaved schedule takes rounds of as many micro-batches as there are ranks, or a little more."""
    return count % max(1, count // ranks) == 0
