"""The node program's file is damaged, and foreign code is put beside it: it is sent again, and that code never runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.proof.faults import Hit, Kind, Step, Target, root_of
from tests.proof.faults.ordinary import kill, to_one

_DAMAGES = (b"", b"\0" * 100_000, b'[["ugro/__init__.py", 0]]\n')
_CODE = "open({marker!r}, 'w').close()\n"
_NAMES = ("sitecustomize.py", "ugro/__init__.py", "ugro/node.py", "ugro/node/main.py", "json.py")


def plant(target: Target, step: Step) -> Hit | None:
    """A link opens right after it: that of a node program that is killed."""
    node = target.nodes[step.node]
    folder = root_of(node) / ".ugro" / "program"
    programs = sorted(folder.glob("*.program"))
    if not programs:
        return None
    for program in programs:
        with suppress(OSError):  # it is replaced meanwhile, or the disk is full
            program.write_bytes(_DAMAGES[int(step.pick * len(_DAMAGES))])
    marker = target.home / f"planted-on-{node.name}"
    planted = [folder / name for name in _NAMES]
    for path in planted:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_CODE.format(marker=str(marker)))
    to_one("node program", kill)(target, step)
    return Hit(f"{node.name}: {len(programs)} damaged", lambda: _expect_not_run(marker, planted))


def _expect_not_run(marker: Path, planted: list[Path]) -> None:
    assert not marker.exists(), f"foreign code ran: {marker}"
    for path in planted:
        path.unlink(missing_ok=True)


KINDS = {"plant": Kind(2, plant)}
