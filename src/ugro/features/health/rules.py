"""What ``ugro doctor`` concludes about one node: an examination in, findings with remedies out.

It judges whether jobs could run there, not how the node is doing right now; that is ``rules_score``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.features.power.model import OwnerReport
from ugro.features.safe_mode.model import REMEDY, SafeMode
from ugro.kernel.agent.model import Finding, Grade, StoodStill
from ugro.kernel.links.model import Facts, Gpu, LinkQuality, Machine
from ugro.kernel.links.rules import LITTLE_SPACE_BYTES, NO_SPACE_BYTES, Examination, SshSettings, Unknown
from ugro.kernel.support.quantities import format_duration, format_size, names
from ugro.node.messages import Packages, Ports, PortUse, Root, Survival

CLOCK_WARNING_S = 1.0
CLOCK_FAILED_S = 30.0
NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "afs"})

# How bad it is, what was found, and what to do about it.
Verdict = tuple[Grade, str, str | None]


def unreachable(name: str, text: str, hint: str | None) -> Finding:
    return Finding(name, "reach", Grade.FAILED, text, hint)


def judge_state(mode: SafeMode) -> Finding:
    """Of an agent in safe mode."""
    text = mode.brief
    not_asked = f"; not asked yet: {mode.unasked}" if mode.not_asked else ""
    return Finding("agent", "state", Grade.FAILED, f"safe mode, nothing is started or ended: {text}{not_asked}", REMEDY)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """On the disk of the agent's state, in bytes."""

    folder: str
    free: int
    kept: int  # for the state, of ``to_keep``
    to_keep: int
    least: int  # with less that is free, nothing but the state is written
    spare: int  # with less, larger files are not collected


def judge_disk(room: DiskRoom) -> Finding | None:
    """Of the disk of the agent's state; None if there is enough."""
    free, kept = format_size(room.free), format_size(room.kept)
    remedy = (
        "make room there: ugro results JOB --rm deletes what an old job made, ugro node gc unused code; "
        f"see what takes it: du -sh {room.folder}/*"
    )
    if room.free < room.least:
        text = (
            f"the disk of {room.folder} is full: {free} free. Logs and results stay on the nodes; the state and new "
            f"jobs are still written, for which {kept} of {format_size(room.to_keep)} are kept"
        )
        return Finding("this machine", "disk", Grade.FAILED, text, remedy)
    if room.free < room.spare:
        least = format_size(room.spare)
        text = f"the disk of {room.folder} is nearly full: {free} free. Results stay on the nodes until {least} are"
        return Finding("this machine", "disk", Grade.WARNING, text, remedy)
    return None


def judge_loop(stood: StoodStill) -> Finding:
    """Of an agent that answered nobody for a while."""
    text = f"it stood still for {format_duration(stood.seconds)}, at {stood.at}: {stood.where}"
    return Finding("agent", "loop", Grade.WARNING, text, "please report it with the end of: ugro agent logs")


def judge_node(node: Examination) -> list[Finding]:
    return [Finding(node.name, check, *verdict) for check in _JUDGES for verdict in _verdicts(node, check)]


def _verdicts(node: Examination, check: str) -> Iterator[Verdict]:
    look_up, judge = _JUDGES[check]
    found = look_up(node)
    if isinstance(found, Unknown):
        yield Grade.WARNING, f"could not be checked: {found.text}", found.hint
    elif found is not None:
        yield from judge(node, found)


def _reach(node: Examination, quality: LinkQuality) -> Iterator[Verdict]:
    by = node.spec.transport if isinstance(node.spec.transport, str) else node.spec.transport[0]
    rtt = f", round trip {format_duration(quality.rtt_s)}" if quality.rtt_s is not None else ""
    yield Grade.OK, f"connected by {by} as {node.machine.user}{rtt}", None


def _host_key(node: Examination, ssh: SshSettings) -> Iterator[Verdict]:
    where = f"in your ssh configuration, for {node.spec.host or node.name}:"
    if ssh.strict_host_key_checking in ("false", "no", "off"):
        text = "your ssh configuration disables the check (StrictHostKeyChecking no): any machine could answer"
        yield Grade.WARNING, text, f"{where} StrictHostKeyChecking ask"
    elif ssh.user_known_hosts_file in ("/dev/null", "none"):
        text = f"your ssh configuration stores no keys (UserKnownHostsFile {ssh.user_known_hosts_file})"
        yield Grade.WARNING, text, f"{where} UserKnownHostsFile ~/.ssh/known_hosts"
    else:
        yield Grade.OK, "checked by ssh", None


def _python(node: Examination, machine: Machine) -> Iterator[Verdict]:
    yield Grade.OK, f"{machine.python} ({machine.python_path})", None


def _packages(node: Examination, packages: Packages) -> Iterator[Verdict]:
    # Whether torch should be installed is judged by comparing nodes.
    if packages.torch:
        named = {"torch": packages.torch, "CUDA": packages.cuda, "NCCL": packages.nccl}
        yield Grade.OK, ", ".join(f"{name} {version}" for name, version in named.items() if version), None


def _root(node: Examination, root: Root) -> Iterator[Verdict]:
    elsewhere = f"under {node.name} in cluster.yaml, on a local disk with room: remote_root: /var/tmp/ugro"
    if root.error is not None or root.free_bytes is None:
        chown = f"on {node.name}: sudo chown {node.machine.user} {root.path}   (or {elsewhere})"
        remedy = chown if root.error == "Permission denied" else elsewhere
        yield Grade.FAILED, f"{root.path} cannot be written: {root.error}", remedy
        return
    left = format_size(root.free_bytes)
    if root.free_bytes < LITTLE_SPACE_BYTES:
        grade = Grade.FAILED if root.free_bytes < NO_SPACE_BYTES else Grade.WARNING
        look = f"ugro node gc {node.name}, or see what takes it: ugro exec {node.name} -- du -xh -d1 {root.path}"
        text = f"the disk of {root.path} {'is full' if grade is Grade.FAILED else 'is nearly full'}: {left} left"
        yield grade, text, f"free some: {look}   (or {elsewhere})"
    else:
        is_remote = root.filesystem in NETWORK_FILESYSTEMS
        kind = f" ({root.filesystem}{', as fast as the network' if is_remote else ''})" if root.filesystem else ""
        yield Grade.OK, f"{root.path} is writable, {left} free{kind}", None


def _clock(node: Examination, quality: LinkQuality) -> Iterator[Verdict]:
    if quality.clock_offset_s is None:
        return
    off_s = abs(quality.clock_offset_s)
    if off_s <= CLOCK_WARNING_S:
        # The offset is uncertain by half a round trip: the node may have answered at any moment of it.
        known_s = off_s + (quality.rtt_s or 0) / 2
        yield Grade.OK, f"within {format_duration(known_s)} of this machine's", None
    else:
        text = f"{format_duration(off_s)} {'ahead of' if quality.clock_offset_s > 0 else 'behind'} this machine's"
        grade = Grade.FAILED if off_s > CLOCK_FAILED_S else Grade.WARNING
        yield grade, text, f"on {node.name} and on this machine: sudo timedatectl set-ntp true"


def _ports(node: Examination, found: Ports) -> Iterator[Verdict]:
    taken = [use for use in found.ports if not use.is_free]
    for use in taken:
        section, _, key = node.port_keys[use.port].partition(".")
        remedy = f"set another port in cluster.yaml, such as {section}: {{{key}: {use.port + 1}}}"
        if use.pid is not None and use.user == node.machine.user:
            remedy = f"end it: ugro exec {node.name} -- kill {use.pid}   (or {remedy})"
        yield Grade.WARNING, f"{section}.{key} {use.port} {_taken_by(use)}", remedy
    if found.ports and not taken:
        numbers = ", ".join(str(use.port) for use in found.ports)
        yield Grade.OK, f"{numbers} {'is' if len(found.ports) == 1 else 'are'} free", None


def _taken_by(use: PortUse) -> str:
    if use.error is not None:
        return f"cannot be used: {use.error}"
    if use.pid is not None:
        return f"is taken by {use.process} (pid {use.pid}, user {use.user})"
    return f"is taken by a process of {use.user}" if use.user is not None else "is taken"


def _gpu(node: Examination, facts: Facts) -> Iterator[Verdict]:
    tool = "rocm-smi" if facts.gpu_source in ("amd-smi", "rocm-smi") else "nvidia-smi"
    look = f"ugro exec {node.name} -- {tool}"
    if facts.gpu_error is not None:
        yield Grade.WARNING, f"GPUs cannot be read: {facts.gpu_error}", f"run: {look}"
    troubles = [verdict for gpu in facts.gpus for verdict in _one_gpu(gpu, look)]
    yield from troubles
    if facts.gpu_error is None and not troubles:
        driver = f", driver {facts.gpu_driver}" if facts.gpu_driver else ""
        names = ", ".join(gpu.name for gpu in facts.gpus)
        yield Grade.OK, f"{names}{driver}" if facts.gpus else "none found", None


def _one_gpu(gpu: Gpu, look: str) -> Iterator[Verdict]:
    label = f"GPU {gpu.index} {gpu.name}"
    if gpu.error is not None:
        yield Grade.FAILED, f"{label} cannot be read: {gpu.error}", f"run: {look}   (reboot the node if it persists)"
    others = [f"{process.name} (pid {process.pid})" for process in gpu.processes if not process.is_ours]
    if gpu.holder is not None:
        yield Grade.WARNING, f"{label} is used by {gpu.holder}", "jobs that need it wait until it is free"
    elif others:
        yield Grade.WARNING, f"{label} is in use by others: {', '.join(others)}", f"wait, or check: {look}"


def _limits(node: Examination, facts: Facts) -> Iterator[Verdict]:
    if facts.limits is None:
        return
    text, survival = facts.limits.words, node.survival
    if not facts.limits.holds_memory and isinstance(survival, Survival) and _may_linger(survival):
        text += f"; to limit it, on {node.name}: sudo loginctl enable-linger {survival.user}"
    yield Grade.OK, text, None


def _may_linger(survival: Survival) -> bool:
    return survival.has_logind and not survival.lingers


def _logout(node: Examination, survival: Survival) -> Iterator[Verdict]:
    if not survival.has_logind:
        yield Grade.OK, "jobs survive it (there is no logind)", None
    elif not survival.kills_processes:
        yield Grade.OK, "jobs survive it (KillUserProcesses=no)", None
    elif survival.lingers:
        yield Grade.OK, "jobs survive it (linger is on)", None
    else:
        text = "logind ends jobs when the connection closes (KillUserProcesses=yes)"
        yield Grade.WARNING, text, f"on {node.name}: sudo loginctl enable-linger {survival.user}"


def _runs(node: Examination, strange: str) -> Iterator[Verdict]:
    look = f"ugro exec {node.name} -- ls -l {node.machine.root}/.ugro/agents"
    remedy = f"see who put them there: {look}   (if you do not know: ugro node drain {node.name})"
    yield Grade.WARNING, f"{strange}; they are ignored", remedy


def _owner(node: Examination, owner: OwnerReport) -> Iterator[Verdict]:
    for text in owner.blind:
        # Who uses the GPUs is read from the driver, which needs no rights.
        remedy = f"on {node.name}: sudo usermod -aG input {node.machine.user}" if "/input/" in text else None
        yield Grade.WARNING, f"somebody there is not always noticed: {text}", remedy
    if owner.error is not None:
        yield Grade.WARNING, f"somebody there is not noticed: {owner.error}", f"look: ugro node show {node.name}"
    elif not owner.is_known:
        yield Grade.WARNING, "it has not said yet whether somebody uses it", f"look again: ugro doctor {node.name}"
    elif not owner.sources:
        remedy = f"under {node.name} in cluster.yaml: owner: {{when: never}}"
        yield Grade.WARNING, f"nobody can be noticed there ({owner.when}): jobs run as if it had no owner", remedy
    else:
        now = owner.words.removeprefix("is ") if owner.words else f"not there now, then {owner.then}"
        yield Grade.OK, f"noticed by {', '.join(owner.sources)}; {now}", None


# The checks in the order in which they are reported: what each looks at, and what judges it.
_JUDGES: dict[str, tuple[Callable[[Examination], Any], Callable[..., Iterator[Verdict]]]] = {
    "reach": (lambda node: node.quality, _reach),
    "host key": (lambda node: node.ssh, _host_key),
    "python": (lambda node: node.machine, _python),
    "packages": (lambda node: node.packages, _packages),
    "root": (lambda node: node.root, _root),
    "clock": (lambda node: node.quality, _clock),
    "ports": (lambda node: node.ports, _ports),
    "gpu": (lambda node: node.facts, _gpu),
    "limits": (lambda node: node.facts, _limits),
    "logout": (lambda node: node.survival, _logout),
    "runs": (lambda node: node.strange_runs, _runs),
    "owner": (lambda node: node.owner, _owner),
}


# --- shared folders ---------------------------------------------------------------------------------------------------
# Nodes that keep their files in one folder: home folders on a file server, or two names for one machine.


_CHECK = "shared folder"


def judge_folders(found: Sequence[Examination]) -> Iterator[Finding]:
    by_folder: dict[str, list[Examination]] = {}
    for one in found:
        if isinstance(one.root, Root) and one.root.folder_id:
            by_folder.setdefault(one.root.folder_id, []).append(one)
    for nodes in by_folder.values():
        if len(nodes) > 1:
            yield _judge(nodes)


def _judge(nodes: Sequence[Examination]) -> Finding:
    together = names([one.name for one in nodes])
    if len({one.machine.boot_id for one in nodes}) < len(nodes):
        text = f"{together} share one folder, and some of these names lead to the same machine"
        remedy = "remove the names you do not need: ugro node rm NAME; UGRO counts each name as a machine of its own"
        return Finding("cluster", _CHECK, Grade.WARNING, text, remedy)
    text = (
        f"{together} share one folder: code is stored once for all of them, each node keeps its runs apart, "
        "and a full disk stops all of them"
    )
    return Finding("cluster", _CHECK, Grade.OK, text)
