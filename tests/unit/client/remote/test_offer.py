"""What a client sends of its machine: what its command names, and nothing else that a master asks for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ugro.features.remote_access.client.offer import Offer, Trees, Wire, why_left_alone
from ugro.kernel.files.code.snapshot_store import SnapshotStore
from ugro.kernel.support.errors import NotAllowed, UgroError, Wanted, error_from_wire
from ugro.kernel.support.state_dir import StateDir
from ugro.node import trees


@dataclass
class Sent:
    items: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    uploaded: dict[str, int] = field(default_factory=dict)

    def ask(self, method: str, path: str, body: Any) -> Any:
        self.asked.append(path)
        return {"has": False, "base": None}

    def upload(self, path: str, pieces: Any) -> Any:
        self.uploaded[path.partition("?")[0]] = len(b"".join(pieces))
        return {"lacking": [], "bad": 0}


def offer_of(home: Path, body: Any, made: frozenset[str] = frozenset()) -> tuple[Offer, Sent]:
    sent, state = Sent(), StateDir(home / ".ugro")
    sending = Trees(state, Wire(sent.ask, sent.upload, lambda text: None))
    return Offer(state, body, sending, sent.items.append, made), sent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text("secret")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".env").write_text("PASSWORD=secret")
    return tmp_path


def submit(home: Path, **more: Any) -> dict[str, Any]:
    return {"here": str(home / "project"), "file": None, "fields": {"script": "train.py"}, **more}


RULES: dict[str, Any] = {
    "exclude": [".git"], "follows_links": False, "links_out": "keep", "max_bytes": 1000, "trusts_times": False,
    "force": False, "without": [],
}  # fmt: skip


@pytest.mark.parametrize("what", ["text", "hash", "folder", "code"])
@pytest.mark.parametrize("path", [".ssh/id_ed25519", "project/.env", ".ssh", "", "project/../.ssh"])
def test_what_no_word_of_the_command_names_is_not_sent(home: Path, what: str, path: str) -> None:
    offer, sent = offer_of(home, submit(home))
    with pytest.raises(NotAllowed, match="does not name"):
        offer.provide(Wanted(what, str(home / path), {**RULES, "home": str(home)}))
    assert (sent.items, sent.asked, sent.uploaded) == ([], [], {})


def test_relative_and_odd_paths_are_not_sent(home: Path) -> None:
    offer, _ = offer_of(home, submit(home))
    for path in ("train.py", "", "../.ssh/id_ed25519", "\0"):
        with pytest.raises(NotAllowed):
            offer.provide(Wanted("text", path))


def test_a_job_file_and_what_it_names_are_sent(home: Path) -> None:
    project = home / "project"
    (project / "job.yaml").write_text("script: train.py\nenvironment: {requirements: reqs/base.txt}\n")
    (project / "reqs").mkdir()
    (project / "reqs" / "base.txt").write_text("-r more.txt\nnumpy\n")
    (project / "reqs" / "more.txt").write_text("torch\n")
    offer, sent = offer_of(home, submit(home, file=str(project / "job.yaml")))
    with pytest.raises(NotAllowed):  # the job file was not read yet
        offer.provide(Wanted("text", str(project / "reqs" / "base.txt")))
    for path in ("job.yaml", "reqs/base.txt", "reqs/more.txt"):
        offer.provide(Wanted("text", str(project / path)))
    assert [item["value"] for item in sent.items][1:] == ["-r more.txt\nnumpy\n", "torch\n"]


def test_a_home_that_the_master_expanded_is_that_of_this_machine(home: Path) -> None:
    (home / "data").mkdir()
    (home / "data" / "a.txt").write_text("mine")
    offer, sent = offer_of(home, submit(home, fields={"folder": ["data=~/data"]}))
    asked = Wanted("folder", "data=/home/there/data", {
        "name": "data", "folder": "/home/there/data", "max_bytes": 1000, "home": "/home/there"
    })  # fmt: skip
    offer.provide(asked)
    assert sent.items[0]["path"] == "data=/home/there/data"
    assert sent.items[0]["value"]["source"] == str(home / "data")
    with pytest.raises(NotAllowed):
        offer.provide(Wanted("text", "/home/there/.ssh/id_ed25519", {"home": "/home/there"}))


def test_code_is_read_by_the_masters_rules_and_uploaded(home: Path) -> None:
    project = home / "project"
    (project / ".git").mkdir()
    (project / ".git" / "config").write_text("x")
    (project / "train.py").write_text("print()")
    offer, sent = offer_of(home, submit(home))
    offer.provide(Wanted("code", str(project), RULES))
    snapshot = sent.items[0]["value"]
    assert (snapshot["files"], snapshot["folder"]) == (1, str(project))  # .env stays here
    assert sent.asked == ["/v1/remote/known"]
    assert sent.uploaded["/v1/remote/trees"] > 0
    with pytest.raises(UgroError, match=r"sync\.max_size"):
        offer.provide(Wanted("code", str(project), {**RULES, "max_bytes": 3}))


def test_the_folder_of_a_script_is_sent_and_no_other_word_of_the_command_makes_one(home: Path) -> None:
    for name in ("project/bin.py", "project/data.py", "train.py"):
        (home / name).write_text("print()")
    (home / "big").mkdir()
    (home / "big" / "known.txt").touch()
    here, named, other = str(home / "big"), str(home / "project" / "bin.py"), str(home / ".ssh" / "id_ed25519")

    def asked(*argv: str, is_command: bool = False) -> Wanted:
        return Wanted("script", "any", {"here": here, "argv": list(argv), "is_command": is_command})

    for fields in ({"script": named, "args": [other]}, {"command": ["python3", "-u", named, other]}):
        offer, sent = offer_of(home, {"here": here, "file": None, "fields": fields})
        for argv in ([other, named], ["python3", other], [str(home / "project" / "data.py")]):
            with pytest.raises(NotAllowed, match="does not name"):
                offer.provide(asked(*argv))
        with pytest.raises(NotAllowed, match="does not name"):
            offer.provide(Wanted("code", str(home / "project"), RULES))
        offer.provide(asked(named, "known.txt", "unknown.txt"))  # what is there of the second word is not said
        assert sent.items[0]["value"] == {"folder": str(home / "project"), "script": "bin.py"}
        offer.provide(Wanted("code", str(home / "project"), RULES))
        assert sent.items[1]["value"]["files"] == 2, "all but .env"
    at_home = {"here": here, "file": None, "fields": {"script": "../train.py"}}
    offer, _ = offer_of(home, at_home)
    offer.provide(asked("../train.py"))
    with pytest.raises(NotAllowed, match="home folder"):
        offer.provide(Wanted("code", str(home), RULES))


def test_a_job_files_script_elsewhere_is_found(home: Path) -> None:
    (home / "jobs").mkdir()
    (home / "project" / "bin.py").write_text("print()")
    for text in ("script: ../project/bin.py\n", "command: [python3, ../project/bin.py]\n"):
        file = home / "jobs" / "job.yaml"
        file.write_text(text)
        offer, sent = offer_of(home, {"here": str(home), "file": str(file), "fields": {}})
        params = {"here": str(home / "jobs"), "argv": ["../project/bin.py"], "is_command": False}
        with pytest.raises(NotAllowed):  # the job file was not read yet
            offer.provide(Wanted("script", "any", params))
        offer.provide(Wanted("text", str(file)))
        offer.provide(Wanted("script", "any", params))
        assert sent.items[-1]["value"] == {"folder": str(home / "project"), "script": "bin.py"}


def test_a_file_that_cannot_be_read_is_said_to_the_master(home: Path) -> None:
    offer, sent = offer_of(home, submit(home, file=str(home / "project" / "job.yaml")))
    offer.provide(Wanted("text", str(home / "project" / "job.yaml")))
    assert sent.items[0]["problem"] == f"{home / 'project' / 'job.yaml'}: no such file or directory"
    (home / "project" / "job.yaml").write_bytes(b"\xff\xfe")
    offer.provide(Wanted("text", str(home / "project" / "job.yaml")))
    assert "UTF-8" in sent.items[1]["problem"]


def test_the_home_folder_is_never_sent_as_a_whole(home: Path) -> None:
    assert why_left_alone(str(home), StateDir(home / ".ugro")) == "your home folder"
    assert why_left_alone(str(home / "project"), StateDir(home / ".ugro")) is None


@pytest.mark.parametrize("what", ["code", "folder"])
def test_a_master_that_asks_for_all_of_the_home_folder_does_not_get_it(home: Path, what: str) -> None:
    asked = Wanted(what, str(home), {**RULES, "name": "data", "max_bytes": 10**9})
    file = home / "job.yaml"
    file.write_text("# all of it: / or .\nscript: train.py\ncommand: cd / && ls .\n")
    offer, sent = offer_of(home, {"here": str(home), "file": str(file), "fields": {"command": ["ls", ".", "/"]}})
    offer.provide(Wanted("place", str(home)))
    offer.provide(Wanted("text", str(file)))
    for path in (str(home), "/"):
        with pytest.raises(NotAllowed, match="not sent"):
            offer.provide(Wanted(what, path, asked.params))
    assert ([item["what"] for item in sent.items], sent.asked, sent.uploaded) == (["place", "text"], [], {})
    named: dict[str, Any] = {"workdir": "."} if what == "code" else {"folder": ["data=."]}
    in_file = "workdir: ." if what == "code" else "folders: {data: .}"
    file.write_text(f"script: train.py\n{in_file}\n")
    for body in ({"here": str(home), "fields": named}, {"here": str(home), "file": str(file), "fields": {}}):
        offer, sent = offer_of(home, body)
        if "file" in body:
            offer.provide(Wanted("text", str(file)))
        offer.provide(asked)
        assert sent.items[-1]["what"] == what, "they mean it"


def test_a_command_that_sends_no_code_does_not_send_it_because_a_master_asks(home: Path) -> None:
    project = home / "project"
    (project / "data").mkdir()
    folder = {**RULES, "name": "data", "max_bytes": 10**9}
    for fields in ({"command": ["ls"], "sync": False}, {"command": ["ls"], "cwd": "/data"}):
        offer, sent = offer_of(home, submit(home, fields=fields))
        with pytest.raises(NotAllowed, match="this command sends none"):
            offer.provide(Wanted("code", str(project), RULES))
        with pytest.raises(NotAllowed, match="does not name"):
            offer.provide(Wanted("folder", str(project), folder))
        assert (sent.items, sent.asked, sent.uploaded) == ([], [], {})
    without = {"here": str(project), "fields": {"sync": False}}
    for body in ({"folder": str(project)}, {"jobs": [without, {"here": str(project), "fields": {}}]}):
        offer, sent = offer_of(home, body)
        offer.provide(Wanted("code", str(project), RULES))
        assert sent.items[0]["value"]["folder"] == str(project)


def sent_kinds(home: Path, rules: dict[str, Any]) -> dict[str, int]:
    """What is in the code that goes to a master which asks with these rules, and what each is."""
    offer, sent = offer_of(home, submit(home))
    offer.provide(Wanted("code", str(home / "project"), {**RULES, **rules}))
    store = SnapshotStore(home / ".ugro" / "remote" / "code").store
    with store.using():
        found = store.entries(trees.parse_id(sent.items[0]["value"]["id"]))
        return {os.fsdecode(entry.name): entry.kind for entry in found}


@pytest.fixture
def project(home: Path) -> Path:
    project = home / "project"
    (project / "train.py").write_text("print()")
    (project / ".gitignore").write_text("secret.txt\n")
    (project / "secret.txt").write_text("secret")
    (project / "key").symlink_to(home / ".ssh" / "id_ed25519")
    (project / "within").symlink_to("train.py")
    return project


@pytest.mark.parametrize("exclude", [[], ["!.env", "!secret.txt"], ["x\n!secret.txt"], ["\ufeff!secret.txt"]])
def test_a_masters_patterns_leave_files_out_and_bring_none_in(home: Path, project: Path, exclude: list[str]) -> None:
    found = sent_kinds(home, {"exclude": exclude})
    assert ("train.py" in found, ".env" in found, "secret.txt" in found) == (True, False, False)
    assert "train.py" not in sent_kinds(home, {"exclude": [*exclude, "*.py"]})


def test_what_the_users_own_file_includes_is_sent(home: Path, project: Path) -> None:
    (project / ".ugroignore").write_text("!.env\n")
    assert ".env" in sent_kinds(home, {})


@pytest.mark.parametrize("rules", [{"follows_links": True}, {"links_out": "follow"}])
def test_a_master_does_not_get_what_a_link_leads_to_unless_the_user_says_so(
    home: Path, project: Path, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UGRO_SYNC_FOLLOW_SYMLINKS", raising=False)
    monkeypatch.delenv("UGRO_SYNC_OUTSIDE_LINKS", raising=False)
    assert sent_kinds(home, rules)["key"] == trees.LINK
    monkeypatch.setenv("UGRO_SYNC_FOLLOW_SYMLINKS", "true")
    monkeypatch.setenv("UGRO_SYNC_OUTSIDE_LINKS", "follow")
    assert sent_kinds(home, rules)["key"] == trees.FILE
    assert sent_kinds(home, {})["key"] == trees.LINK, "the master does not ask for it"


# --- variables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"env": ["TOKEN"]}, {"env": "TOKEN"}, {"env": {"TOKEN": None}}])
def test_a_variable_that_the_command_names_may_be_asked_for_and_no_other(home: Path, fields: dict[str, Any]) -> None:
    offer, _ = offer_of(home, submit(home, fields=fields))
    offer.expect_variables(["TOKEN"])
    with pytest.raises(NotAllowed, match="variable 'AWS_SECRET_ACCESS_KEY'") as caught:
        offer.expect_variables(["TOKEN", "AWS_SECRET_ACCESS_KEY"])
    assert "-e AWS_SECRET_ACCESS_KEY" in str(caught.value.hint)


def test_files_of_the_command_name_variables_but_not_in_their_comments(home: Path) -> None:
    project = home / "project"
    (project / "job.yaml").write_text("# like OTHER\nenv: {TOKEN: null}\nenvironment: {requirements: reqs.txt}\n")
    (project / "reqs.txt").write_text("--index-url https://ann:${INDEX_TOKEN}@example.org/simple  # not MORE\n")
    offer, _ = offer_of(home, submit(home, file=str(project / "job.yaml")))
    with pytest.raises(NotAllowed):
        offer.expect_variables(["TOKEN"])  # the file was not read yet
    for name in ("job.yaml", "reqs.txt"):
        offer.provide(Wanted("text", str(project / name)))
    offer.expect_variables(["TOKEN", "INDEX_TOKEN"])
    for name in ("OTHER", "MORE"):
        with pytest.raises(NotAllowed):
            offer.expect_variables([name])


def test_the_text_of_a_sweep_names_variables(home: Path) -> None:
    text = "command: ['${program}', '--key=${envvar:WANDB_KEY}']\nenv: [OTHER]\n"
    offer, _ = offer_of(home, {"submit": submit(home), "text": text, "file": "sweep.yaml"})
    offer.expect_variables(["WANDB_KEY", "OTHER"])
    with pytest.raises(NotAllowed):
        offer.expect_variables(["HOME"])


def test_what_a_master_has_put_into_a_launch_names_nothing(home: Path) -> None:
    key = str(home / ".ssh" / "id_ed25519")
    fields = {"env": ["AWS_SECRET_ACCESS_KEY", "TOKEN"], "folder": [f"data={home / '.ssh'}"], "args": [key]}
    made = frozenset({"AWS_SECRET_ACCESS_KEY", f"data={home / '.ssh'}", key})
    offer, sent = offer_of(home, submit(home, fields=fields))
    offer.provide(Wanted("text", key))  # as long as these are the user's words
    offer, sent = offer_of(home, submit(home, fields=fields), made)
    offer.expect_variables(["TOKEN"])
    with pytest.raises(NotAllowed):
        offer.expect_variables(["AWS_SECRET_ACCESS_KEY"])
    for what, path in (("text", key), ("folder", str(home / ".ssh"))):
        with pytest.raises(NotAllowed, match="does not name"):
            offer.provide(Wanted(what, path, {"name": "data", "max_bytes": 1000}))
    assert sent.items == []


def test_what_is_wanted_survives_the_wire() -> None:
    wanted = Wanted("code", "/x", {"a": [1]})
    found = error_from_wire(wanted.to_wire())
    assert isinstance(found, Wanted)
    assert (found.what, found.path, found.params) == ("code", "/x", {"a": [1]})
