"""Which attempt holds which device. The database itself refuses a second holder, unless a group shares the GPU."""

from __future__ import annotations

from ugro.core.job import Job, Share
from ugro.core.login import node_of
from ugro.store import logins
from ugro.store.connection import Connection


def names_of(job: Job, share: Share) -> list[str]:
    """Without GPUs the job itself is the device, so that every job on a node is shown."""
    if share.gpu_group:
        return [f"gpu:{index}/{share.gpu_group}/{job.id}" for index in share.gpus]
    return [f"gpu:{index}" for index in share.gpus] or [f"job:{job.id}"]


def hold(db: Connection, job: Job, share: Share, attempt: int) -> str | None:
    """Why not, if others have one of the GPUs."""
    for index in share.gpus:
        if not _is_open(db, share, index, job):
            return f"GPU {index} of {node_of(share.node)} is held by others"
    logins.remember(db, share)
    for device in names_of(job, share):
        query = "INSERT INTO held_devices (node, device, job, attempt) VALUES (?, ?, ?, ?)"
        db.execute(query, (node_of(share.node), device, job.id, attempt))
    return None


def _is_open(db: Connection, share: Share, index: int, job: Job) -> bool:
    """Those that share a GPU are rows of their own; nobody else may be beside them."""
    query = "SELECT device FROM held_devices WHERE node = ? AND (device = ? OR substr(device, 1, ?) = ?)"
    own, shares = f"gpu:{index}", f"gpu:{index}/"
    held = [str(row["device"]) for row in db.execute(query, (node_of(share.node), own, len(shares), shares))]
    if not share.gpu_group:
        strangers = [device for device in held if device != own]  # the primary key refuses the same name
    else:
        strangers = [device for device in held if not device.startswith(f"{shares}{share.gpu_group}/")]
    sharing = job.spec.resources.sharing
    return not strangers and (sharing is None or len(held) < sharing.most)
