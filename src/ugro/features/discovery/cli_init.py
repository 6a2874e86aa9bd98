"""``ugro init``: writes the cluster file, or adds hosts to it, after trying to reach them."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ugro.cli import health
from ugro.cli.host_keys import NewKeys
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.before_agent import with_second_names
from ugro.client.client import Client
from ugro.client.launcher import find_cluster_file, nearest_cluster_file
from ugro.features.discovery.operations import ListSshHosts, ReadClusterFile, WriteClusterFile
from ugro.kernel.agent.model import ClusterFacts, ClusterFileWish, NewHost
from ugro.kernel.links.model import NodeReport, Status
from ugro.kernel.links.operations import ExamineHosts
from ugro.kernel.support.errors import ConfigError, NotFound, UgroError, UsageError
from ugro.kernel.support.quantities import format_size
from ugro.kernel.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir

_SSH_CONFIG = "~/.ssh/config"
_OWN_CONFIG = f"without the option, {_SSH_CONFIG} is read"
_UNKNOWN_KEY, _UNKNOWN_NAME = "host-key-unknown", "name-not-found"
_NOT_YET = frozenset({_UNKNOWN_KEY, _UNKNOWN_NAME})
_ALL_THE_SAME = "correct it, or give its HostName in ~/.ssh/config; if only its network is away: ugro node add NAME"


@dataclass(frozen=True, slots=True)
class Wish:
    """The command's options."""

    hosts: tuple[str, ...]
    ssh_config: str | None
    output: Path | None
    here: bool | None
    local: bool | None
    accept_new: bool
    force: bool


@click.command()
@click.argument("hosts", nargs=-1)
@click.option("--ssh-config", help="ssh configuration to read and to use; default: ~/.ssh/config.")
@click.option(
    "--here/--user",
    default=None,
    help="Write ./cluster.yaml, for this folder and those below; or ~/.ugro/cluster.yaml, for all folders.",
)
@click.option("--output", type=click.Path(path_type=Path), help="File to write.")
@click.option("--local/--no-local", default=None, help="Add this machine as a node, too.  [default: in a new file]")
@click.option("--accept-new", is_flag=True, help="Accept SSH host keys that are not known yet, without asking.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
@pass_session
def init(session: Session, /, **options: Any) -> int:
    """Write the cluster file from your SSH hosts, or add hosts to it.

    Tries to reach HOSTS (NAME, USER@HOST or USER@HOST:PORT), or the hosts in ~/.ssh/config, all at once. Shows SSH host
    keys that are not known yet, and asks whether to accept them. HOSTS that you name become nodes also if they do not
    answer, but not if ssh does not find the name (exit code 4); of ~/.ssh/config, only those that answer.

    If there is a cluster file for this folder, hosts are added to it, and nothing else in it changes.

    \b
    Examples:
      ugro init
      ugro init gpu1 ann@10.0.0.7 --accept-new
    """
    wish = Wish(**options)
    ssh_config = _readable(wish.ssh_config) if wish.ssh_config else None
    path = _path(session, wish)
    _check_writable(path)
    # With any cluster: the file to be written may not exist yet, or may be invalid.
    client = session.new_client(any_cluster=True)
    is_new = wish.force or not os.path.lexists(path)
    before = None if is_new else _existing(client, path, ssh_config, _again(session, wish))
    if before is not None and _is_found(session, wish, path):
        client.require_allowed(path)  # its ssh configuration is about to be used
    probe = Probe(session.output, client, ssh_config or (before.ssh_config if before else None), wish)
    reports = probe.reports(before)
    if before is None and not reports and wish.local is False:
        raise NotFound(f"no hosts in {probe.source}", hint="name some: ugro init gpu1 me@10.0.0.7")
    chosen = probe.chosen(reports)
    if not chosen and (unknown := probe.unknown(reports)) and len(unknown) == len(reports):
        raise NotFound(f"no such host name: {', '.join(unknown)}", hint=f"nothing was written; {_ALL_THE_SAME}")
    hosts = [_host(report) for report in reports if report in chosen or report.same_as]
    has_local = wish.local is not False if is_new else wish.local is True
    wished = ClusterFileWish(tuple(hosts), is_new, has_local, ssh_config)
    client.ask(WriteClusterFile(str(path.absolute()), wished))
    _tell(session.output, path, probe, reports, is_new=is_new)
    return NotFound.exit_code if probe.unknown(reports) else 0


@dataclass(slots=True)
class Probe:
    """Tries hosts that are no nodes yet, and asks about their keys."""

    output: Output
    client: Client
    ssh_config: str | None
    wish: Wish
    unaccepted: tuple[str, ...] = ()  # nobody could be asked about their keys

    @property
    def source(self) -> str:
        return self.ssh_config or _SSH_CONFIG

    def reports(self, before: ClusterFacts | None) -> list[NodeReport]:
        """In the order in which the hosts are named. All hosts are tried before anything is written."""
        named = tuple(dict.fromkeys(self.wish.hosts)) or self.client.ask(ListSshHosts(self.ssh_config))
        nodes = [host.word for host in before.hosts] if before is not None else []
        wanted = [word for word in named if before is None or not before.has(word)]
        found = {report.name: report for report in self._examine([*nodes, *wanted] if wanted else [])}
        keys = NewKeys(self.output, self.client, self.ssh_config, self.wish.accept_new)
        accepted = [word for word in wanted if found[word].cause == _UNKNOWN_KEY and keys.accept(word)]
        found |= {report.name: report for report in self._examine(accepted)}
        self.unaccepted = tuple(keys.left)
        has_local = self.wish.local is not False if before is None else before.has_local
        in_order = [found[word] for word in (*nodes, *wanted) if word in found]
        return [one for one in with_second_names(in_order, has_local=has_local) if one.name in wanted]

    def chosen(self, reports: Sequence[NodeReport]) -> list[NodeReport]:
        """Those that become nodes."""
        return [
            report
            for report in reports
            if report.same_as is None
            and (report.status is not Status.UNREACHABLE or (self.wish.hosts and report.cause not in _NOT_YET))
        ]

    def unknown(self, reports: Sequence[NodeReport]) -> list[str]:
        """The hosts that the user has named and that ssh does not find. One behind a jump host is found there."""
        return [one.name for one in reports if self.wish.hosts and one.cause == _UNKNOWN_NAME]

    def _examine(self, words: Sequence[str]) -> list[NodeReport]:
        if not words:
            return []
        reports: list[NodeReport] = []
        self.output.progress(f"trying {len(words)} hosts")
        for report in self.client.follow(ExamineHosts(tuple(words), self.ssh_config)):
            reports.append(report)
            self.output.progress(f"tried {len(reports)} of {len(words)} hosts")
        self.output.end_progress()
        return reports


def _path(session: Session, wish: Wish) -> Path:
    """The file that is named; else that of this folder, if there is one; else the user's, or where he wants it."""
    home = StateDir.find(os.environ)
    of_user = home.path / CLUSTER_FILE
    if (named := wish.output or session.cluster or os.environ.get(CLUSTER_VARIABLE)) is not None and str(named):
        return Path(named).expanduser()
    if wish.here is not None:
        return Path(CLUSTER_FILE) if wish.here else of_user
    found = nearest_cluster_file(os.environ, Path.cwd(), home).path
    if found is not None:
        return found
    question = "Use this cluster in all folders? (No: in this folder and those below.)"
    if session.output.can_ask and not session.output.confirm([], question, default=True):
        return Path(CLUSTER_FILE)
    return of_user


def _is_found(session: Session, wish: Wish, path: Path) -> bool:
    """Not named: somebody else may have written it."""
    is_named = wish.output or session.cluster or os.environ.get(CLUSTER_VARIABLE)
    return not is_named and path != StateDir.find(os.environ).path / CLUSTER_FILE


def _existing(client: Client, path: Path, ssh_config: str | None, again: str) -> ClusterFacts:
    try:
        found = client.ask(ReadClusterFile(str(path.absolute())))
    except ConfigError as error:
        raise ConfigError(error.message, hint=f"correct it, or overwrite it: {again}") from error
    if ssh_config not in (None, found.ssh_config):
        raise UsageError(
            f"{path} does not use the ssh configuration {ssh_config}",
            hint=f"set it there first, as ssh.config_file; or overwrite the file: {again}",
        )
    return found


def _host(report: NodeReport) -> NewHost:
    if report.facts is None or report.machine is None:
        return NewHost(report.name, str(report.error), report.same_as)
    gpus = ", ".join(gpu.model for gpu in report.facts.gpus) or "no GPU"
    size = format_size(report.machine.memory_total_bytes)
    return NewHost(report.name, f"{gpus}; {report.machine.cores} cores, {size}", report.same_as)


def _tell(output: Output, path: Path, probe: Probe, reports: Sequence[NodeReport], *, is_new: bool) -> None:
    if reports or output.is_json:
        health.show(output, reports if output.is_json else _shown(reports, probe))
    elif is_new:
        output.note(f"no hosts in {probe.source}; the file has this machine only")
    for report in reports:
        if report.same_as is not None:
            output.note(f"not added: {report.name} is the same machine as {report.same_as}")
    chosen = probe.chosen(reports)
    others = [report.name for report in reports if report not in chosen and report.same_as is None]
    unknown = probe.unknown(reports)
    silent = [name for name in others if name not in probe.unaccepted and name not in unknown]
    if unknown:
        output.note(f"not added: no such host name: {', '.join(unknown)}; {_ALL_THE_SAME}")
    if silent:
        output.note(f"not added: {', '.join(silent)}; to try again: ugro init")
    if probe.unaccepted:
        names = " ".join(map(shlex.quote, probe.unaccepted))
        output.note(f"not added, because host keys are not known: {names}; compare the keys above on the machines")
        output.note(f"accept these keys and add the hosts: ugro init --accept-new {names}, or in a terminal: ugro init")
    did = "wrote" if is_new else f"added {len(chosen)} to" if chosen else "nothing to add to"
    output.note(f"{did} {path}; next: {_next(path)}")


def _shown(reports: Sequence[NodeReport], probe: Probe) -> list[NodeReport]:
    """Each machine once; without the hint to accept a key, because all such hosts are named together."""
    distinct = (report for report in reports if report.same_as is None)
    return [replace(report, hint=None) if report.name in probe.unaccepted else report for report in distinct]


def _again(session: Session, wish: Wish) -> str:
    if wish.output is None and session.cluster is not None:
        return f"ugro --cluster {shlex.quote(str(session.cluster))} init --force"
    return "ugro init --force" + (f" --output {shlex.quote(str(wish.output))}" if wish.output else "")


def _next(path: Path) -> str:
    """A plain ``ugro health`` may use another file: that of a lab, or of another folder."""
    found = find_cluster_file(None, os.environ, Path.cwd(), StateDir.find(os.environ)).path
    is_found = found is not None and found.exists() and found.samefile(path)
    return "ugro health" if is_found else f"ugro --cluster {shlex.quote(str(path))} health"


def _readable(ssh_config: str) -> str:
    path = os.path.abspath(os.path.expanduser(ssh_config))
    if not os.path.exists(path):
        raise UsageError(f"--ssh-config {ssh_config}: no such file", hint=_OWN_CONFIG)
    if os.path.isdir(path) or not os.access(path, os.R_OK):
        raise UsageError(f"--ssh-config {ssh_config}: cannot be read", hint=_OWN_CONFIG)
    return path


def _check_writable(path: Path) -> None:
    """Checked before the hosts are tried, which takes a while."""
    folder = path.parent
    _make_if_own(folder)
    hint = None
    if not os.path.exists(folder):
        problem, hint = errno.ENOENT, f"create its directory first: mkdir -p {shlex.quote(str(folder))}"
    elif not os.path.isdir(folder):
        problem = errno.ENOTDIR
    elif os.path.isdir(path):
        problem = errno.EISDIR
    elif not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        problem = errno.EACCES
    else:
        return
    raise UgroError(f"{path} cannot be written: {os.strerror(problem).lower()}", hint=hint)


def _make_if_own(folder: Path) -> None:
    """Creates the state directory, if the file goes there: this may be the first command."""
    state = StateDir.find(os.environ)
    if Path(os.path.abspath(folder)) == state.path:
        try:
            state.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise state.unusable(error) from error
