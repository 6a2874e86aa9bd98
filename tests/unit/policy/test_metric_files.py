"""Files of metrics are fetched from a working directory even if an ignore file names them."""

from __future__ import annotations

from ugro.kernel.files.rules import Selection, choose
from ugro.node.files.listing import RunFile


def test_ignored_files_stay_on_the_node_but_metrics_come() -> None:
    names = [b"runs/a/events.out.tfevents.17.host", b"wandb/run-1-a/run-a.wandb", b"runs/a/model.pt", b"wandb/x.log"]
    files = [RunFile(name, 1, 0, 1, None)._replace(is_work=True) for name in names]
    choice = choose(files, Selection(named_by=lambda name: ".gitignore"))
    assert [file.name for file in choice.wanted] == names[:2]
    assert {(one.file.name, one.reason) for one in choice.left} == {(name, "named by .gitignore") for name in names[2:]}
