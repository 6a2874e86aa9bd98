"""The door's program and HAProxy's configuration, without HAProxy."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path

import pytest

from tests.unit.policy.serving.places import job, service
from ugro.features.services.model import Balance, DoorSettings, NewServer, Probe, Probes, ServiceSpec
from ugro.features.services.node.door_config import Descriptors, configuration, error_body, server_words
from ugro.features.services.node.door_machine import RefusedError, expect_words, make_state_folder
from ugro.features.services.node.door_records import InvalidError, Measures, Records, is_up, number, parsed, waiting
from ugro.features.services.service.door import _MODULES, SECRET, door_env, door_job, is_shut_out
from ugro.features.services.service.replicas import door_settings
from ugro.kernel.jobs.model import Job

OLDEST = (3, 9)
SETTINGS = DoorSettings("chat", 8000, "/state")


def of(**changes: object) -> dict[str, object]:
    return {**asdict(SETTINGS), **changes}


def server(**changes: object) -> dict[str, object]:
    return {**asdict(NewServer("one", "10.0.0.1", 9000, 40)), "number": 3, **changes}


def lines(settings: dict[str, object], secret: str = "") -> list[str]:
    text = configuration(settings, [server(), server(name="new", canary=True)], Descriptors(3, 4, 5, 6), secret, 2)
    return [line.strip() for line in text.splitlines()]


def test_every_part_of_the_program_runs_on_an_old_python() -> None:
    """Its syntax; that its library is there, ``make test-remote`` would have to show."""
    for name in _MODULES:
        package, _, module = name.rpartition(".")
        text = resources.files(package).joinpath(f"{module}.py").read_text("utf-8")
        ast.parse(text, feature_version=OLDEST)
        assert "strict=" not in text
        assert "asyncio.timeout" not in text


def test_a_job_has_its_secret_in_no_argument() -> None:
    spec = door_job(SETTINGS, "gpu1", secret="hidden")
    assert dict(spec.env)[SECRET] == "hidden"
    assert "hidden" not in " ".join(spec.argv)
    assert spec.resources.only == ("gpu1",)
    assert SECRET not in door_env(SETTINGS)


def test_a_door_has_its_folder_in_the_account_that_it_runs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = door_settings(service())
    for account in ("ugro", "ann"):
        root = tmp_path / account / "grid"
        monkeypatch.setenv("UGRO_RUN_DIR", str(root / ".ugro/agents/a@gpu1@m/runs/5.1"))
        assert make_state_folder(settings.state_folder) == str(root / ".ugro/services/k")
        assert (root / ".ugro/services/k").is_dir()
    assert make_state_folder(str(tmp_path / "whole")) == str(tmp_path / "whole")
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match=r"cannot make its folder .*/file/state: Not a directory"):
        make_state_folder(str(tmp_path / "file" / "state"))


def test_a_door_that_names_a_folder_of_another_account_is_known() -> None:
    def placed(settings: DoorSettings, node: str) -> Job:
        return replace(job(0, node=node), spec=door_job(settings, "gpu1"))

    assert is_shut_out(placed(SETTINGS, "ann@gpu1"))
    assert not is_shut_out(placed(SETTINGS, "gpu1"))
    assert not is_shut_out(placed(door_settings(service()), "ann@gpu1"))
    assert not is_shut_out(replace(placed(SETTINGS, "gpu1"), placement=None))


def test_servers_are_checked_and_canaries_have_the_others_behind_them() -> None:
    found = lines(of(health_path="/health"))
    one = [line for line in found if line.startswith("server one ")]
    assert len(one) == 2
    assert "check" in one[0]
    assert one[0].startswith("server one 10.0.0.1:9000 weight 40 maxconn 2000 ")
    assert " backup check " in one[1]
    assert len([line for line in found if line.startswith("server new ")]) == 1
    assert found.count("http-check send meth GET uri /health ver HTTP/1.1 hdr host door") == 2


def test_the_door_checks_replicas_by_the_status_and_time_of_their_readiness_probe() -> None:
    probe = Probe("/health", timeout_s=20.0, status=(200, 404))
    spec = ServiceSpec("chat", probes=replace(Probes(), ready=probe))
    found = lines(asdict(door_settings(replace(service(), spec=spec))))
    assert found.count("http-check expect status 200-404") == 2
    assert "timeout check 20000ms" in found
    assert "timeout check 3000ms" in lines(asdict(door_settings(service())))


@pytest.mark.parametrize("path", ["health", "/a b", "/a\nserver x 6.6.6.6:1", "/a#b", '/"'])
def test_a_path_that_would_change_the_configuration_is_refused(path: str) -> None:
    with pytest.raises(RefusedError):
        expect_words(of(health_path=path))
    expect_words(of(health_path="/v1/models?x=1"))


def test_the_fastest_comes_first_where_places_are_counted() -> None:
    settings = of(balance=Balance.FIRST)
    fast, slow = (server_words(settings, server(weight=weight, number=1), "replicas") for weight in (100, 25))
    ids = [int(words.split(" id ")[1].split()[0]) for words in (fast, slow)]
    assert ids[0] < ids[1]
    assert " id " not in server_words(settings, server(), "canary")


def test_an_address_of_ipv6_has_brackets() -> None:
    assert server_words(of(), server(address="::1"), "replicas").startswith("[::1]:9000 ")


def test_what_is_not_asked_for_is_not_there() -> None:
    plain = "\n".join(lines(of(wait_s=0.0, most_body_bytes=0)))
    for word in ("inside", "waiting unix", "keys.map", "ssl crt", "413", "411", "Authorization", "disable-l7"):
        assert word not in plain, word
    full = "\n".join(lines(of(needs_key=True, certificate="/c", certificate_key="/k", retries_posts=False), "hidden"))
    for word in ("inside", "server waiting unix@", "keys.map", "ssl crt", "413", "411", 'Bearer hidden"', "disable-l7"):
        assert word in full, word


def test_errors_have_the_shape_that_clients_of_openai_read() -> None:
    assert json.loads(error_body("server_error", "no replica is ready"))["error"] == {
        "message": "no replica is ready",
        "type": "server_error",
        "param": None,
        "code": None,
    }


STAT = """# pxname,svname,qcur,scur,stot,hrsp_5xx,status
door,FRONTEND,,3,9,1,OPEN
replicas,one,1,2,7,0,UP 1/3
replicas,two,0,0,0,0,DOWN
replicas,BACKEND,4,6,9,1,UP
canary,one,0,1,1,0,no check
canary,BACKEND,0,0,0,0,UP
"""


def test_counters_are_those_of_both_backends() -> None:
    rows = parsed(STAT)
    assert (number(rows, "one", "scur"), number(rows, "one", "stot"), number(rows, "none", "stot")) == (3, 8, 0)
    assert is_up(rows, server())
    assert not is_up(rows, server(name="two"))
    assert waiting(rows) == 4


def test_the_log_gives_times_and_what_is_no_answer_does_not_count() -> None:
    measures = Measures()
    measures.feed(b"replicas one 200 5 10 115 1 0 --\nreplicas one 200 0 0 20")
    measures.feed(
        b"0 4 0 --\nreplicas <NOSRV> 503 0 -1 9 0 0 SC\nreplicas one 101 0 0 9 1 0 --\nreplicas one 200 0 0 9 1 0 CD\n"
    )
    measures.feed(b"replicas two 500 0 0 50 1 0 --\nhalf a line +3\n")
    assert measures.latency("one")["count"] == 2
    assert measures.latency()["count"] == 3
    assert measures.latency("one")["mean_s"] == pytest.approx((0.110 + 0.200) / 2)
    pace = measures.pace("one")
    assert (pace["count"], round(pace["x"], 3)) == (2, 1.386)
    assert measures.pace("two") == {}, "an error says nothing about speed"
    assert measures.sampled_share == 1.0


def test_what_is_too_much_to_read_is_counted() -> None:
    measures = Measures()
    measures.feed(b"replicas one 200 0 0 20 1 0 --\n" * 10_000)
    assert 0.1 < measures.sampled_share < 0.5
    assert measures.latency()["count"] <= 4000


def test_records_are_found_again(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    records.add(asdict(NewServer("one", "10.0.0.1", 9000)))
    records.set_keys({"ab" * 32: "ann"})
    records.share = 100
    records.save()
    again = Records(str(tmp_path))
    assert (again.servers, again.keys, again.share) == (records.servers, records.keys, 100)
    assert again.add(asdict(NewServer("two", "10.0.0.1", 9001)))["number"] == 2
    assert (tmp_path / "door.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"servers": {"x": {"name": "x"}}}', '{"servers": {}, "keys": {"k": "v"}}']
)
def test_damaged_records_are_put_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / "door.json").write_text(text)
    records = Records(str(tmp_path))
    assert (records.servers, records.keys) == ({}, {})
    assert (tmp_path / "door.json.damaged").read_text() == text


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "one two"},
        {"name": "waiting"},
        {"name": "-x"},
        {"address": "gpu1"},
        {"address": "10.0.0.1 check"},
        {"port": 0},
        {"weight": 257},
        {"limit": -1},
    ],
)
def test_a_server_that_would_change_the_configuration_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    records = Records(str(tmp_path))
    with pytest.raises(InvalidError):
        records.add({**asdict(NewServer("one", "10.0.0.1", 9000)), **changes})
    assert records.servers == {}
