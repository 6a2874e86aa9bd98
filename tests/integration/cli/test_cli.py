"""The command line as programs and people use it: documents, tables, exit codes, names, speed; and the Python API."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.cli.main import cli
from ugro.client.client import Ended, OutputPiece
from ugro.features.exec.operations import EndCommand
from ugro.kernel.agent.operations import AddNode, DrainNode, ResumeNode
from ugro.kernel.links.model import Status
from ugro.kernel.support.errors import NotFound, Unsatisfiable, UsageError
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

HOT = SimulatedGpu("NVIDIA GeForce RTX 4070", temperature_c=91, memory_used_bytes=8 * 2**30)
COOL = SimulatedGpu("NVIDIA GeForce RTX 4070")
EVIL = SimulatedGpu("RTX\x1b]0;owned\x07\x1b[2J")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What n001 reports; may be changed at any time."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("not installed: a C compiler")
    return tmp_path_factory.mktemp("gpus") / "gpus"


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(2)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm, gpus: Path) -> Iterator[Ugro]:
    write_gpus(gpus, [COOL])
    variables = {"UGRO_NVML_LIBRARY": str(build_nvml_stub(gpus.parent)), "UGRO_PRETEND_GPUS": str(gpus)}
    with commands(farm.cluster_yaml(nodes={"n001": {"env": variables, "labels": ["gpu"]}})) as ugro:
        assert ugro("health").returncode == 0
        yield ugro


# --- documents -----------------------------------------------------------------------------------------------------

# Every command but those that other tests hold, and the key of its document; None where it is a stream of documents.
DOCUMENTS: dict[str, tuple[tuple[str, ...], str | set[str] | None]] = {
    "health": ((), "nodes"),
    "node ls": ((), "nodes"),
    "node show": (("n001",), {"node", "hardware"}),
    "node drain": (("n002",), "node"),
    "node resume": (("n002",), "node"),
    "node trust": (("n001",), "host_key"),
    "node add": (("here", "--host", "127.0.0.1", "--port", "1"), "nodes"),
    "node rm": (("here",), "removed"),
    "node gc": ((), "tidied"),
    "exec": (("n001", "--", "echo", "hi"), None),
    "agent start": ((), "agent"),
    "agent status": ((), "agent"),
    "agent logs": ((), None),
    "agent backup": (("copy.db",), "backup"),
    "agent restore": (("--list",), "backups"),
    "init": (("--output", "new.yaml"), "nodes"),
    "agent restart": ((), "agent"),
    "agent stop": ((), "stopped"),
}
HELD_ELSEWHERE = {
    *("agent install", "agent uninstall"),
    *("agent reconcile", "doctor", "demo", "lab up", "lab down", "lab status"),
    *("node bench", "node discover", "node setup", "node sleep", "node wake"),
}


def test_no_command_is_forgotten_here() -> None:
    assert {name for name in leaves(cli) if name not in HELD_ELSEWHERE} >= set(DOCUMENTS)
    base = {"init", "health", "node", "exec", "agent"}
    assert {name for name in leaves(cli) if name.split()[0] in base} - HELD_ELSEWHERE == set(DOCUMENTS)


def leaves(group: click.Group, prefix: str = "") -> Iterator[str]:
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from leaves(command, f"{prefix}{name} ")
            else:
                yield f"{prefix}{name}"


@pytest.mark.parametrize("is_before", [pytest.param(True, marks=pytest.mark.proof), False])
def test_json_gives_one_document_and_nothing_else(ugro: Ugro, is_before: bool) -> None:
    for made in ("new.yaml", "copy.db"):
        (ugro.home / "cwd" / made).unlink(missing_ok=True)
    for name, (words, key) in DOCUMENTS.items():
        argv = ["--json", *name.split(), *words] if is_before else [*name.split(), "--json", *words]
        answer = ugro(*argv)
        assert answer.returncode in (0, 5), (name, answer.stderr)
        assert answer.stderr == "", name
        if key is None:
            assert all(isinstance(json.loads(line), dict) for line in answer.stdout.splitlines()), name
        else:
            assert set(json.loads(answer.stdout)) == ({key} if isinstance(key, str) else key), name
        assert answer.stdout.endswith("\n")


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (("health", "n404"), "not_found", 4),
        (("health", "--nope"), "usage", 2),
        (("health", "--interval", "0"), "usage", 2),
        (("helth",), "usage", 2),
        (("node",), "usage", 2),
        (("node", "show"), "usage", 2),
        (("node", "show", "n404"), "not_found", 4),
        (("node", "add", "n001"), "usage", 2),
        (("node", "rm", "n404"), "not_found", 4),
        (("node", "drain", "n404"), "not_found", 4),
        (("node", "sleep", "n001"), "usage", 2),
        (("node", "wake", "n404"), "not_found", 4),
        (("node", "resume", "n404"), "not_found", 4),
        (("node", "trust", "n404"), "not_found", 4),
        (("exec", "n404", "--", "true"), "not_found", 4),
        (("exec", "n001", "true"), "usage", 2),
        (("init", "--force", "--", "-x"), "usage", 2),
        (("--cluster", "missing.yaml", "health"), "config", 2),
        ((), "usage", 2),
    ],
)
def test_json_gives_one_document_also_in_failure(ugro: Ugro, words: tuple[str, ...], kind: str, code: int) -> None:
    answer = ugro("--json", *words)
    assert answer.returncode == code
    document = json.loads(answer.stdout)
    assert set(document) == {"error"}
    assert document["error"]["kind"] == kind
    assert document["error"]["hint"]
    assert answer.stderr.startswith("error: ")
    assert "Traceback" not in answer.stderr


def test_what_belongs_to_another_program_is_not_read_as_ours(ugro: Ugro) -> None:
    answer = ugro("exec", "n404", "--", "ls", "--json")
    assert (answer.returncode, answer.stdout) == (4, "")


REPORT_KEYS = {
    *("name", "status", "score", "reasons", "checked_at", "since", "error", "hint", "cause", "drained", "role"),
    *("same_as", "labels", "target", "machine", "facts", "link", "found_by", "owner", "power"),
}
MACHINE_KEYS = {
    *("hostname", "os", "kernel", "arch", "boot_id", "user", "root", "python", "python_path", "cores", "cpu_model"),
    *("memory_total_bytes", "machine_id", "home", "home_id"),
}
FACTS_KEYS = {
    *("time_unix", "uptime_s", "load", "cpu_use_ratio", "memory_total_bytes", "memory_available_bytes", "disks"),
    *("gpus", "gpu_source", "gpu_driver", "gpu_error", "rank_processes", "limits"),
}
GPU_KEYS = {
    *("index", "uuid", "name", "memory_total_bytes", "memory_used_bytes", "use_ratio", "temperature_c", "power_w"),
    *("power_limit_w", "energy_j", "throttle", "processes", "error", "holder"),
}
AGENT_KEYS = {
    *("pid", "version", "generation", "started_at", "home", "cluster_file", "cluster_name", "nodes"),
    "cluster_found",
    *("nodes_connected", "running_commands", "config_error", "config_hint", "ignored_variables"),
    *("state_error", "state_hint", "store", "last_backup", "backup_problem", "safe_mode"),
    *("team_socket", "team_problem", "api_url", "api_problem", "disk_problem", "disk_hint", "stood_still"),
}


def test_the_documents_have_these_keys_and_programs_rely_on_them(ugro: Ugro, gpus: Path) -> None:
    write_gpus(gpus, [HOT])
    try:
        for words in (("health",), ("node", "ls")):
            report = json.loads(ugro(*words, "--json").stdout)["nodes"][0]
            assert set(report) == REPORT_KEYS
            assert set(report["machine"]) == MACHINE_KEYS
            assert set(report["facts"]) == FACTS_KEYS
            assert set(report["facts"]["disks"][0]) == {"mount", "total_bytes", "free_bytes"}
            assert set(report["facts"]["gpus"][0]) == GPU_KEYS
            assert set(report["link"]) == {"rtt_s", "loss_ratio", "clock_offset_s"}
            assert set(report["reasons"][0]) == {"part", "text", "points"}
        ugro("agent", "start")
        assert set(json.loads(ugro("agent", "status", "--json").stdout)["agent"]) == AGENT_KEYS
        key = json.loads(ugro("node", "trust", "n001", "--json").stdout)["host_key"]
        assert set(key) == {"node", "address", "fingerprints", "known_fingerprints", "is_trusted", "known_hosts"}
    finally:
        write_gpus(gpus, [COOL])


# --- tables and text -----------------------------------------------------------------------------------------------


def test_a_table_in_a_pipe_is_tab_separated_and_whole(ugro: Ugro, gpus: Path) -> None:
    name = "A GPU with a name that no terminal of eighty columns would show as a whole"
    write_gpus(gpus, [SimulatedGpu(name), COOL])
    try:
        answer = ugro("health", env={"COLUMNS": "20", "TERM": "xterm"})
    finally:
        write_gpus(gpus, [COOL])
    header, first, other_gpu, second = [line.split("\t") for line in answer.stdout.splitlines()]
    assert other_gpu[:8] == first[:8]
    assert other_gpu[8] == "1 RTX 4070"
    assert " ".join(header) == "node status score rtt load cpu mem disk gpu use vram temp power note"
    assert (first[0], first[8], second[0]) == ("n001", f"0 {name}", "n002")
    assert len(first) == len(second) == len(header)
    assert "\x1b" not in answer.stdout + answer.stderr


def test_a_node_cannot_send_control_characters_to_a_terminal(ugro: Ugro, gpus: Path) -> None:
    write_gpus(gpus, [EVIL])
    try:
        for words in (("health",), ("node", "ls"), ("node", "show", "n001")):
            argv = ["script", "-qec", " ".join(ugro.argv(*words)), "/dev/null"]
            plain = {"NO_COLOR": "1", "TERM": "xterm"}
            piped = ugro(*words).stdout
            shown = subprocess.run(argv, env=ugro.environment(plain), capture_output=True, text=True, timeout=30).stdout
            for text in (piped, shown):
                assert "RTX�]0;owned" in text, words
                assert "\x07" not in text
                assert "\x1b]" not in text
                assert "\x1b[2J" not in text
    finally:
        write_gpus(gpus, [COOL])


def test_quiet_leaves_results_and_errors(ugro: Ugro) -> None:
    assert ugro("-q", "health").stderr == ""
    assert ugro("-q", "health", "n404").stderr.startswith("error: ")


@pytest.mark.parametrize("words", [("health",), ("node", "ls"), ("--help",), ("agent", "logs"), ("health", "--json")])
def test_a_reader_that_leaves_early_is_no_error(ugro: Ugro, words: tuple[str, ...]) -> None:
    ugro("agent", "start")
    reader, writer = os.pipe()
    os.close(reader)
    argv = ugro.argv(*words)
    done = subprocess.run(argv, env=ugro.environment(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "rror" not in done.stderr
    assert done.returncode in (0, 1)


def test_strange_places_for_output_are_survived(ugro: Ugro) -> None:
    full = ["sh", "-c", '"$@" >/dev/full', "sh", *ugro.argv("health", "--json")]
    done = subprocess.run(full, env=ugro.environment(), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: no space left on device\n")
    closed = ["sh", "-c", '"$@" >&- 2>&-', "sh", *ugro.argv("health")]
    assert subprocess.run(closed, env=ugro.environment(), timeout=30).returncode == 0
    assert ugro("health", env={"PYTHONIOENCODING": "ascii"}).returncode == 0


def test_a_misspelt_command_is_guessed(ugro: Ugro) -> None:
    for typed, meant in {"helth": "ugro health", "node drian": "ugro node drain", "agnet": "ugro agent"}.items():
        answer = ugro(*typed.split())
        assert answer.returncode == 2
        assert answer.stderr == f"error: no such command: {typed.split()[-1]}\nhint:  did you mean: {meant}?\n"
    assert ugro("zzz").stderr == "error: no such command: zzz\nhint:  see: ugro --help\n"


def test_alone_it_shows_its_help(ugro: Ugro) -> None:
    answer = ugro()
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == ugro("--help").stdout
    assert "health" in answer.stdout
    for group in ("node", "lab", "agent"):
        alone = ugro(group)
        assert (alone.returncode, alone.stderr) == (0, "")
        assert alone.stdout == ugro(group, "--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("health --interval 0.1", "--interval: expected 0.2 to 3600 seconds"),
        ("health --interval nan", "--interval: expected 0.2 to 3600 seconds"),
        ("node add gpu1 --port 0", "--port: expected a whole number from 1 to 65535"),
        ("node add gpu1 --port many", "--port: expected a whole number from 1 to 65535"),
        ("agent logs -n -1", "--tail: expected a whole number, 0 or more"),
        ("cluster start --nodes x", "--nodes: expected a whole number, 1 or more"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_its_limits(ugro: Ugro, words: str, said: str) -> None:
    answer = ugro(*words.split())
    assert (answer.returncode, answer.stderr.splitlines()[0]) == (2, f"error: {said}")


# --- health --------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_the_exit_code_of_health_tells_how_the_nodes_are(ugro: Ugro, farm: SshdFarm, gpus: Path) -> None:
    assert ugro("health").returncode == 0
    write_gpus(gpus, [HOT])
    sick = ugro("health")
    assert sick.returncode == 1
    assert "91 °C" in sick.stdout
    assert sick.stderr.startswith("1 healthy · 1 ")
    assert ugro("health", "n002").returncode == 0
    assert ugro("health", "@gpu").returncode == 1
    farm["n002"].stop()
    try:
        wait_until(lambda: ugro("health").returncode == 5, 20, "the stopped node to be seen")
        gone = ugro("health", "n002")
        assert gone.stdout.splitlines()[1].startswith("n002\tunreachable")
        assert "n002: is sshd running there" in gone.stderr
    finally:
        farm["n002"].start()
        write_gpus(gpus, [COOL])
    wait_until(lambda: ugro("health").returncode == 0, 30, "all to be well again")


@pytest.mark.proof
def test_watching_goes_on_until_ctrl_c_also_over_a_new_agent(ugro: Ugro) -> None:
    with ugro.start("health", "--watch", "--interval", "0.2", "--json") as watching:
        assert watching.stdout is not None
        for _ in range(2):
            assert len(json.loads(watching.stdout.readline())["nodes"]) == 2
        before = json.loads(ugro("agent", "status", "--json").stdout)["agent"]["generation"]
        ugro("agent", "stop")
        wait_until(lambda: generation(ugro) > before, 20, "the next look to start an agent")
        assert len(json.loads(watching.stdout.readline())["nodes"]) == 2
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) in (0, 5)
        assert watching.stderr is not None
        assert b"Traceback" not in watching.stderr.read()


def generation(ugro: Ugro) -> int:
    agent = json.loads(ugro("agent", "status", "--json").stdout)["agent"]
    return int(agent["generation"]) if agent else 0


# --- speed ---------------------------------------------------------------------------------------------------------

_MODULES_AFTER = """
import sys
from ugro.cli.main import run
code = run(sys.argv[1:])
sys.stdout.flush()
sys.stderr.write("\\n" + " ".join(sorted(sys.modules)) + "\\n")
sys.exit(code)
"""
HEAVY = {
    *("asyncio", "email", "fastapi", "http", "httpx", "logging", "pydantic", "rich", "sqlite3", "ssl", "starlette"),
    *("statistics", "subprocess", "tempfile", "uvicorn", "yaml", "random", "hashlib", "secrets", "shutil"),
    *("ugro.kernel.agent.agent", "ugro.kernel.config.load", "ugro.kernel.config.schema", "ugro.kernel.links.link"),
    *("ugro.kernel.links.rules", "ugro.kernel.store.database", "ugro.kernel.store.engine"),
}


def modules_after(ugro: Ugro, *words: str) -> set[str]:
    argv = [sys.executable, "-c", _MODULES_AFTER, *words]
    done = subprocess.run(argv, env=ugro.environment(), capture_output=True, text=True, timeout=30, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_a_warm_command_imports_nothing_heavy(ugro: Ugro) -> None:
    ugro("agent", "start")
    assert modules_after(ugro, "health") & HEAVY == set()
    assert modules_after(ugro, "health", "--json") & HEAVY == set()
    assert modules_after(ugro, "exec", "n002", "--", "true") & HEAVY == set()
    # Its options come from the schema of job files, which needs no library.
    heavy = {"asyncio", "pydantic", "ugro.kernel.agent.agent", "ugro.kernel.links.link", "yaml"}
    assert modules_after(ugro, "run", "--help") & heavy == set()
    # click itself brings shutil along to lay out its help.
    assert modules_after(ugro, "--help") & {*HEAVY, "json", "pathlib", "socket", "ugro.client.client"} <= {"shutil"}


def cpu_s(ugro: Ugro, *argv: str) -> float:
    process = subprocess.Popen(argv, env=ugro.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, argv
    return usage.ru_utime + usage.ru_stime


@pytest.mark.proof
@pytest.mark.parametrize(("words", "most"), [(("--help",), 1.8), (("health", "n002"), 3.2)])
def test_a_command_costs_little_more_than_its_interpreter_and_click(
    ugro: Ugro, words: tuple[str, ...], most: float
) -> None:
    """Other work on the machine only adds to what is measured, so the least of several, taken in turn, is compared."""
    assert ugro("health").returncode == 0
    base_s = command_s = float("inf")
    for _ in range(25):
        base_s = min(base_s, cpu_s(ugro, sys.executable, "-c", "import click"))
        command_s = min(command_s, cpu_s(ugro, *ugro.argv(*words)))
    assert command_s < most * base_s


# --- the Python API ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(ugro: Ugro, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Of a program with the same environment as the commands."""
    for name, value in ugro.environment().items():
        monkeypatch.setenv(name, value)
    with Client() as client:
        yield client


def test_a_program_can_do_what_the_commands_do(client: Client) -> None:
    reports = client.health()
    assert [(report.name, report.status) for report in reports] == [
        ("n001", Status.HEALTHY),
        ("n002", Status.HEALTHY),
    ]
    assert reports[0].facts is not None
    assert reports[0].facts.gpus[0].model == "RTX 4070"
    events = list(client.exec(["@all"], ["sh", "-c", "echo $0 out; exit 3", "the"]))
    output = {event.node: event.content for event in events if isinstance(event, OutputPiece)}
    assert output == {"n001": b"the out\n", "n002": b"the out\n"}
    assert {(event.node, event.exit_code) for event in events if isinstance(event, Ended)} == {("n001", 3), ("n002", 3)}
    assert client.agent().nodes_connected == 2


def test_the_best_node_is_never_a_drained_one_from_that_moment_on(client: Client) -> None:
    first = client.best_node()
    assert first.name in ("n001", "n002")
    client.ask(DrainNode(first.name, "rest"))
    try:
        second = client.best_node()
        assert {first.name, second.name} == {"n001", "n002"}
        assert [(out.name, out.reason) for out in second.excluded] == [(first.name, "is drained: rest")]
        client.ask(DrainNode(second.name))
        with pytest.raises(Unsatisfiable, match="no node can take work"):
            client.best_node()
    finally:
        client.ask(ResumeNode("n001"))
        client.ask(ResumeNode("n002"))
    assert client.best_node().excluded == ()


def test_errors_are_typed(client: Client) -> None:
    with pytest.raises(NotFound) as caught:
        client.health(["n01"])
    assert caught.value.hint == "did you mean n001?"
    with pytest.raises(UsageError):
        client.ask(AddNode("n001"))
    with pytest.raises(UsageError):
        list(client.exec(["n001"], []))


def test_calls_can_be_made_while_a_command_streams(client: Client) -> None:
    running = client.exec(["n001"], ["sh", "-c", "echo begun; until [ -e go ]; do sleep 0.02; done; echo done"])
    first = next(running)
    assert isinstance(first, OutputPiece)
    assert first.content == b"begun\n"
    assert len(client.health()) == 2
    [touched] = [event for event in client.exec(["n001"], ["touch", "go"]) if isinstance(event, Ended)]
    assert touched.exit_code == 0
    rest = list(running)
    assert [event.content for event in rest if isinstance(event, OutputPiece)] == [b"done\n"]
    list(client.exec(["n001"], ["rm", "go"]))


def test_leaving_an_iterator_ends_its_command(client: Client, farm: SshdFarm) -> None:
    running = client.exec(["n001"], ["sh", "-c", "echo here; exec sleep 1000"], key="mine")
    assert isinstance(next(running), OutputPiece)
    client.ask(EndCommand("mine"))
    [ended] = [event for event in running if isinstance(event, Ended)]
    assert ended.signal == signal.SIGTERM
    abandoned = client.exec(["n001"], ["sh", "-c", "echo $$; exec sleep 1000"])
    first = next(abandoned)
    assert isinstance(first, OutputPiece)
    abandoned.close()
    pid = int(first.content)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10, "the command to end")


@pytest.mark.proof
def test_a_long_lived_client_survives_its_agent(client: Client, ugro: Ugro) -> None:
    assert len(client.health()) == 2
    before = client.agent()
    assert ugro("agent", "stop").returncode == 0
    client.ask(DrainNode("n002"))
    assert client.agent().generation == before.generation + 1
    before = client.agent()
    assert client.stop_agent()
    assert not client.stop_agent()
    assert client.running_agent() is None
    client.ask(DrainNode("n002"))
    client.ask(ResumeNode("n002"))
    assert client.agent().generation == before.generation + 1
    assert len(client.health()) == 2
