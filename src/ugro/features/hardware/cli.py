"""Measured hardware as text: tables of devices, nodes, links and all-reduces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from ugro.cli import candidates
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.hardware.model import (
    PRECISIONS,
    AllReduceFigures,
    DeviceFigures,
    LinkFigures,
    Measurement,
    Mode,
    NodeFigures,
    Part,
    Progress,
    StorageFigures,
)
from ugro.features.hardware.operations import NodeHardware
from ugro.features.health import cli as doctor
from ugro.kernel.links.model import by_name
from ugro.kernel.support.errors import Interrupted
from ugro.kernel.support.quantities import format_duration, format_size

_DEVICE_HEADER = ("NODE", "DEVICE", "FP32", "TF32", "BF16", "FP16", "INT8", "MEMORY", "TO IT", "FROM IT")
_NODE_HEADER = ("NODE", "ONE CORE", "ALL CORES", "MEMORY", "WRITE", "READ", "RANDOM READS", "FSYNC")
_LINK_HEADER = ("FROM", "TO", "THERE", "BACK", "LATENCY", "JITTER", "ADDRESS", "NOTE")
_ALLREDUCE_HEADER = ("ALL-REDUCE", "TIME", "PER RANK", "RANKS", "BACKEND", "NODES")


def show_measurement(output: Output, measured: Measurement) -> None:
    if any(node.devices for node in measured.nodes):
        output.table(_DEVICE_HEADER, _device_rows(measured.nodes), spare=("INT8", "TF32", "FROM IT", "TO IT"))
    if any(node.cpu or node.memory_bytes_per_s or node.storage for node in measured.nodes):
        output.table(_NODE_HEADER, [_node_row(node) for node in measured.nodes])
    if measured.links:
        output.table(_LINK_HEADER, [_link_row(link) for link in measured.links], spare=("ADDRESS", "JITTER"))
    if measured.allreduces:
        output.table(_ALLREDUCE_HEADER, [_allreduce_row(one) for one in measured.allreduces])
    show_skipped(output, measured)


def show_skipped(output: Output, measured: Measurement) -> None:
    """To stderr: it is no figure."""
    found = [f"{one.what}: {one.why}" for one in measured.skipped]
    found += [f"{node.node}, {one.what}: {one.why}" for node in measured.nodes for one in node.skipped]
    if found:
        output.note("not measured:", *(f"  {line}" for line in found))


def details(hardware: NodeHardware) -> list[tuple[str, str]]:
    """For ``ugro node show``; nothing if nothing was measured."""
    figures = hardware.figures
    lines = [*_own(figures)] if figures is not None else []
    lines += [f"to {link.target}: {link.error or _link(link)}" for link in hardware.links]
    lines += [_allreduce(one) for one in hardware.allreduces]
    about = f"{figures.measured_at}, {figures.mode}{_with(figures)}" if figures is not None else "its links"
    return [("measured", about), *(("", f"  {line}") for line in lines)] if lines else []


def _own(figures: NodeFigures) -> Iterator[str]:
    for device in figures.devices:
        yield f"{device_name(device)}: {_device(device) or 'no figures'}"
    if (cpu := figures.cpu) is not None:
        one, every = per_second(cpu.one_core_bytes_per_s), per_second(cpu.all_cores_bytes_per_s)
        yield f"CPU compresses {one} on one core, {every} on {cpu.cores}"
    if figures.memory_bytes_per_s is not None:
        yield f"memory copies {per_second(figures.memory_bytes_per_s)}"
    if (disk := figures.storage) is not None:
        yield f"storage {_storage(disk)}"


def _device(device: DeviceFigures) -> str:
    rates = [f"{name} {flops(rate, name)}" for name in PRECISIONS if (rate := device.rate(name))]
    copies = {
        "memory": device.memory_bytes_per_s,
        "to it": device.to_device_bytes_per_s,
        "from it": device.from_device_bytes_per_s,
    }
    return ", ".join([*rates, *(f"{what} {per_second(rate)}" for what, rate in copies.items() if rate)])


def _storage(disk: StorageFigures) -> str:
    cached = " (from a cache)" if disk.is_cached else ""
    random = disk.random_reads_per_s
    parts = [
        f"writes {per_second(disk.write_bytes_per_s)}" if disk.write_bytes_per_s is not None else "",
        f"reads {per_second(disk.read_bytes_per_s)}{cached}" if disk.read_bytes_per_s is not None else "",
        f"{random:,.0f} random reads/s" if random is not None else "",
        f"fsync {_time(disk.fsync_s)}" if disk.fsync_s is not None else "",
    ]
    return ", ".join(part for part in parts if part) or "no figures"


def _link(link: LinkFigures) -> str:
    parts = [
        f"{per_second(link.bytes_per_s)} there" if link.bytes_per_s is not None else "",
        f"{per_second(link.back_bytes_per_s)} back" if link.back_bytes_per_s is not None else "",
        f"round trip {_time(link.latency_s)}" if link.latency_s is not None else "",
        f"jitter {_time(link.jitter_s)}" if link.jitter_s is not None else "",
    ]
    return ", ".join(part for part in parts if part) or "no figures"


def _allreduce(one: AllReduceFigures) -> str:
    who = f"{one.backend}, {one.ranks} ranks on {', '.join(one.nodes)}"
    return f"all-reduce of {one.size_bytes // 10**6} MB: {_time(one.seconds)} ({who})"


def device_name(device: DeviceFigures) -> str:
    return f"GPU {device.index} {device.name}" if device.is_gpu else f"CPU {device.name}"


def flops(rate: float | None, precision: str) -> str:
    if rate is None:
        return ""
    unit = "OP/s" if precision == "int8" else "FLOP/s"
    return f"{rate:.3g} T{unit}" if rate >= 1 else f"{rate * 1000:.3g} G{unit}"


def per_second(size_bytes: float | None) -> str:
    return "" if size_bytes is None else f"{format_size(size_bytes)}/s"


def _with(figures: NodeFigures) -> str:
    parts = [f"driver {figures.driver}" if figures.driver else "", f"PyTorch {figures.torch}" if figures.torch else ""]
    words = "".join(f", {part}" for part in parts if part)
    return f"{words}, while the node was busy" if figures.is_forced else words


def _device_rows(nodes: Iterable[NodeFigures]) -> list[list[Cell]]:
    return [
        [
            Cell(node.node, "bold"),
            Cell(device_name(device)),
            *(Cell(flops(device.rate(name), name), is_number=True) for name in PRECISIONS),
            _rate(device.memory_bytes_per_s),
            _rate(device.to_device_bytes_per_s),
            _rate(device.from_device_bytes_per_s),
        ]
        for node in nodes
        for device in node.devices
    ]


def _node_row(node: NodeFigures) -> list[Cell]:
    cpu, disk = node.cpu, node.storage
    random = disk.random_reads_per_s if disk else None
    return [
        Cell(node.node, "bold"),
        _rate(cpu.one_core_bytes_per_s if cpu else None),
        _rate(cpu.all_cores_bytes_per_s if cpu else None),
        _rate(node.memory_bytes_per_s),
        _rate(disk.write_bytes_per_s if disk else None),
        Cell(per_second(disk.read_bytes_per_s) + (" cached" if disk.is_cached else "") if disk else "", is_number=True),
        Cell(f"{random:,.0f}/s" if random is not None else "", is_number=True),
        Cell(_time(disk.fsync_s) if disk else "", is_number=True),
    ]


def _link_row(link: LinkFigures) -> list[Cell]:
    return [
        Cell(link.source, "bold"),
        Cell(link.target, "bold"),
        _rate(link.bytes_per_s),
        _rate(link.back_bytes_per_s),
        Cell(_time(link.latency_s), is_number=True),
        Cell(_time(link.jitter_s), is_number=True),
        Cell(link.address),
        Cell(link.error or "", "bad"),
    ]


def _allreduce_row(one: AllReduceFigures) -> list[Cell]:
    return [
        Cell(f"{one.size_bytes // 10**6} MB"),
        Cell(_time(one.seconds), is_number=True),
        _rate(one.bytes_per_s),
        Cell(str(one.ranks), is_number=True),
        Cell(one.backend),
        Cell(", ".join(one.nodes)),
    ]


def _rate(size_bytes: float | None) -> Cell:
    return Cell(per_second(size_bytes), is_number=True)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


# --- bench ------------------------------------------------------------------------------------------------------------
# ``ugro node bench``: measures the hardware of nodes and the links between them.


_MOST_NAMED = 4


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("--quick", is_flag=True, help="Take at most 15 seconds instead of two minutes.")
@click.option("--only", multiple=True, type=click.Choice([str(part) for part in Part]), help="Measure only this part.")
@click.option("--force", is_flag=True, help="Measure busy nodes, too. Their figures are marked and not compared.")
@json_option
@pass_session
def bench(session: Session, nodes: tuple[str, ...], quick: bool, only: tuple[str, ...], force: bool) -> int:
    """Measure devices, CPU, memory, storage and the network.

    NODES are names, @all or @label; the default is all nodes. Devices and all-reduces need PyTorch on the nodes. What
    cannot be measured is listed with the reason. The nodes take no jobs meanwhile. Ctrl-C ends everything on them.

    The figures are kept. `balance: static`, the choice of nodes and `ugro node show` use them, and `ugro doctor`
    reports a device that has become much slower.

    \b
    Examples:
      ugro node bench --quick
      ugro node bench gpu1 gpu2 --only network --only allreduce
    """
    parts = [Part(word) for word in only] or list(Part)
    mode = Mode.QUICK if quick else Mode.FULL
    measured = _measured(session, nodes, parts, mode=mode, force=force)
    if session.output.is_json:
        session.output.document({"measurement": measured})
    else:
        show_measurement(session.output, measured)
        doctor.show(session.output, measured.findings)
    session.output.note(f"measured in {format_duration(measured.took_s)}")
    return 0 if measured.nodes or measured.links or measured.allreduces else 1


def _measured(
    session: Session, nodes: tuple[str, ...], parts: list[Part], *, mode: Mode, force: bool
) -> Measurement:
    at: dict[str, str] = {}
    try:
        for said in session.client(uses_nodes=True).hardware.measure(nodes, mode=mode, parts=parts, force=force):
            if isinstance(said, Measurement):
                return said
            _show_progress(session.output, said, at)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the measurement was ended on the nodes, and nothing was recorded") from None
    raise AssertionError("the agent sends the measurement or an error")


def _show_progress(output: Output, said: Progress, at: dict[str, str]) -> None:
    """``at``: what each node is at; what is about all of them replaces that."""
    if said.node:
        at[said.node] = said.phase
    else:
        at.clear()
    words = [f"{node} {at[node]}" for node in sorted(at, key=by_name)] or [said.phase]
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    left = f", at most {said.left_s:.0f} s left" if said.left_s is not None else ""
    output.progress(f"measuring: {' · '.join(words[:_MOST_NAMED])}{more}{left}")
