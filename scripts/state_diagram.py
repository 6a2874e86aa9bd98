"""The picture of a job's life in ARCHITECTURE.md, made from the table of legal moves. ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from ugro.kernel.jobs.model import FINAL_STATES, MOVES

_BEGIN, _END = "<!-- moves: made by scripts/state_diagram.py -->\n", "<!-- end of moves -->\n"


def diagram() -> str:
    width = max(len(state) for state in MOVES)
    lines = [f"{old:<{width}} → {' · '.join(moves)}" for old, moves in MOVES.items() if moves]
    return "\n".join(["```", *lines, "```", f"Final: {', '.join(sorted(FINAL_STATES))}.", ""])


def main(arguments: list[str]) -> int:
    is_check = "--check" in arguments
    path = Path(next(word for word in arguments if word != "--check"))
    text = path.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        sys.stderr.write(f"{path} has no place for the diagram\n")
        return 1
    wanted = before + begin + diagram() + end + after
    if wanted == text:
        return 0
    if is_check:
        sys.stderr.write(f"{path} shows another table of moves; run: make docs\n")
        return 1
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
