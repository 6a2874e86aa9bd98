"""What is said of a disk that takes nothing more."""

from __future__ import annotations

import errno
from pathlib import Path

from ugro.node import machine as disk


def test_a_quota_that_is_used_up_is_not_told_as_a_full_disk_with_much_free(tmp_path: Path) -> None:
    told = disk.refusal(OSError(errno.EDQUOT, "Disk quota exceeded"), str(tmp_path), "the run cannot be set up: ")
    assert told == (disk.NO_SPACE, f"the run cannot be set up: the disk quota is used up in {tmp_path}")
    kind, text = disk.refusal(OSError(errno.ENOSPC, "No space left on device"), str(tmp_path))
    assert (kind, text.endswith(" free")) == (disk.NO_SPACE, True)
