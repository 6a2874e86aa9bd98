"""Python environments on a node, the decisions: what a recipe may say, why an installer failed, what is removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ugro.features.environments.node import tidy
from ugro.features.environments.node.build import Installer
from ugro.features.environments.node.failures import Failed, Mask, explain, index_variables
from ugro.features.environments.node.installers import Site, Uv
from ugro.features.environments.node.place import Place, Recipe, delete, required_names
from ugro.features.environments.node.tidy import Found, choose
from ugro.node import durable
from ugro.node.machine import machine_id
from ugro.node.runs.runspec import RunSpec

HASH = "--hash=sha256:" + 64 * "a"
GB = 1 << 30


def recipe(**more: Any) -> Recipe:
    fields = {"name": "e1", "platform": {"python": "3.11"}, "requirements": f"numpy==2.0 {HASH}\n"}
    installer = {"name": "uv", "content": 64 * "a", "size": 1}
    return Recipe({**fields, "installer": installer, "tree": 64 * "b", **more})


@pytest.mark.parametrize(("script", "kind"), [("kill -KILL $$", "killed"), ("kill -SEGV $$", "crashed")])
def test_an_installer_that_somebody_else_killed_did_not_crash(tmp_path: Path, script: str, kind: str) -> None:
    with pytest.raises(Failed) as failed:
        Installer({"PATH": "/usr/bin:/bin"}, str(tmp_path), Mask(())).run(["sh", "-c", script])
    assert failed.value.kind == kind
    assert "ended by signal" in str(failed.value)


# --- where packages come from --------------------------------------------------------------------------------------


def test_installers_find_indexes_in_variables_of_their_own() -> None:
    where = ("https://me:secret@a/", ["https://b/", "https://c/"], ["/wheels", "https://d/"])
    assert index_variables("uv", *where) == {
        "UV_DEFAULT_INDEX": "https://me:secret@a/",
        "UV_INDEX": "https://b/ https://c/",
        "UV_FIND_LINKS": "/wheels,https://d/",
    }
    assert index_variables("pip", *where) == {
        "PIP_INDEX_URL": "https://me:secret@a/",
        "PIP_EXTRA_INDEX_URL": "https://b/ https://c/",
        "PIP_FIND_LINKS": "/wheels https://d/",
    }
    assert index_variables("uv", None, [], []) == {}


@pytest.mark.parametrize("is_offline", [True, False])
def test_an_installer_without_internet_is_given_no_index(is_offline: bool, tmp_path: Path) -> None:
    wheels = [{"name": "numpy-2.0-py3-none-any.whl", "content": 64 * "a", "size": 1}]
    offline: dict[str, Any] = {"wheels": wheels} if is_offline else {}
    asked = recipe(index_url="https://a/", extra_index_url=["https://b/"], **offline)
    assert asked.is_offline is is_offline
    site = Site(Place(str(tmp_path)), str(tmp_path / "site"))
    given = {name for name in Uv("/uv", site, asked).variables() if "INDEX" in name}
    assert given == (set() if is_offline else {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_STRATEGY"})


# --- recipes -------------------------------------------------------------------------------------------------------


def test_a_recipe_counts_its_packages_over_continued_lines_and_comments() -> None:
    text = f"# by uv\nnumpy==2.0 \\\n    {HASH} \\\n    {HASH}\n    # via torch\ntorch==2.13.0 {HASH}\n"
    assert recipe(requirements=text).count == 2


@pytest.mark.parametrize(
    "line",
    ["numpy==2.0", f"--index-url http://u:p@x/ {HASH}", f"-r other.txt {HASH}", "a==2.0 --hash=md5:1", f"-e . {HASH}"],
)
def test_a_requirement_without_a_hash_or_an_option_among_them_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="without a hash"):
        recipe(requirements=line)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../x"}, {"name": ".locks"}, {"name": ""}, {"name": "a.making"}, {"platform": {"python": "3.11; rm"}},
        {"index_url": "http://a b"}, {"index_url": "-x"}, {"extra_index_url": ["http://a\n"]}, {"find_links": ["a,b"]},
        {"tree": "short"}, {"installer": {"name": "../uv", "content": 64 * "a", "size": 1}},
        {"wheels": [{"name": "a.whl", "content": "short", "size": 1}]},
    ],
)  # fmt: skip
def test_a_recipe_that_leads_elsewhere_or_is_incomplete_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        recipe(**wrong)
    assert "http" not in str(refused.value)  # it may hold a password


def test_packages_with_a_condition_need_not_be_there() -> None:
    text = f"Foo.Bar==1 {HASH}\ncolorama==1 ; sys_platform == 'win32' {HASH}\nx[extra]==2 {HASH}"
    assert required_names(text) == ["foo-bar", "x"]


def test_a_run_names_its_environment_or_is_refused() -> None:
    ranks = [{"rank": 0, "argv": ["x"]}]
    assert RunSpec({"ranks": ranks}).environment is None
    assert RunSpec({"ranks": ranks, "environment": "e1"}).environment == "e1"
    for wrong in ("../e1", "", 3):
        with pytest.raises(ValueError, match="environment"):
            RunSpec({"ranks": ranks, "environment": wrong})


# --- failures ------------------------------------------------------------------------------------------------------

UV_MISSING = """\
  × No solution found when resolving dependencies:
  ╰─▶ Because there is no version of tiny==9.0 and you require tiny==9.0, we can
      conclude that your requirements are unsatisfiable."""
UV_NEWER = """\
Using Python 3.11.7 environment at: env
error: No solution found when resolving dependencies
  cause: Because tiny was not found in the package registry and you require tiny==1.0, we can conclude that"""
UV_OFFLINE = """\
error: Failed to fetch: `http://127.0.0.1:1/simple/tiny/`
  Caused by: Request failed after 3 retries
  Caused by: error sending request for url (http://127.0.0.1:1/simple/tiny/)
  Caused by: client error (Connect)"""

UV_BUSY = """\
error: Failed to fetch: `http://127.0.0.1:1/simple/tiny/`
  Caused by: Request failed after 3 retries
  Caused by: HTTP status server error (503 Service Unavailable) for url (http://127.0.0.1:1/simple/tiny/)"""
UV_CUT = """\
  × Failed to download `tiny==1.2`
  ├─▶ Request failed after 3 retries
  ├─▶ error sending request for url (http://127.0.0.1:1/files/tiny-1.2-py3-none-any.whl)
  ╰─▶ connection closed before message completed"""
PIP_TRIED = """\
WARNING: Retrying (Retry(total=4)) after connection broken by 'Connection aborted.': /simple/tiny/
ERROR: No matching distribution found for tiny==9.0"""
PIP_BUSY = """\
WARNING: Could not fetch URL http://x/simple/tiny/: 503 Server Error: Service Unavailable for url - skipping
ERROR: Could not find a version that satisfies the requirement tiny==1.2 (from versions: none)
ERROR: No matching distribution found for tiny==1.2"""


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (UV_MISSING, "not-found", "no version of tiny==9.0 and you require"),
        (UV_NEWER, "not-found", "was not found: Because tiny was not found in the package registry"),
        (UV_NEWER + "\n\nhint: An index URL (http://x) could not be queried (401 Unauthorized)", "no-access", "http://x"),
        (UV_OFFLINE, "no-network", "error sending request"),
        (UV_BUSY, "server-failed", "503 Service Unavailable"),
        (UV_CUT, "server-failed", "connection closed"),
        ("  cause: HTTP status client error (429 Too Many Requests) for url (http://x/)", "server-failed", "429"),
        ("  Caused by: Connection reset by peer (os error 104)", "server-failed", "reset"),
        (PIP_BUSY, "server-failed", "503"),
        ("ERROR: HTTP error 502 while getting http://x/files/tiny.whl", "server-failed", "502"),
        (PIP_TRIED, "not-found", "tiny==9.0"),
        ("error: Hash mismatch for `tiny==1.0`\n\nExpected:\n  sha256:aa", "hash", "tiny==1.0"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "hash", "DO NOT MATCH"),
        ("error: Failed to extract\n  Caused by: No space left on device (os error 28)", "no-space", "os error 28"),
        ("OSError: [Errno 122] Disk quota exceeded", "no-space", "quota"),
        ("ERROR: No matching distribution found for tiny==9.0", "not-found", "tiny==9.0"),
        ("  Caused by: HTTP status client error (401 Unauthorized) for url (http://x/)", "no-access", "401"),
        ("error: No interpreter found for Python 3.4 in managed installations", "python-missing", "3.4"),
        ("Segmentation fault", "crashed", "uv ended with code 2: Segmentation fault"),
        ("", "crashed", "uv ended with code 2"),
    ],
)
def test_why_an_installer_failed_is_read_from_its_last_lines(said: str, kind: str, words: str) -> None:
    reason = explain(said.splitlines(), "uv ended with code 2")
    assert reason.kind == kind
    assert words in reason.text
    assert "\n" not in reason.text


def test_a_full_disk_is_the_reason_even_if_it_made_a_download_fail() -> None:
    lines = ["error: Failed to fetch: `http://x/`", "Caused by: error sending request", "Caused by: os error 28"]
    assert explain(lines, "").kind == "no-space"


def test_passwords_are_masked_in_whatever_an_installer_says() -> None:
    mask = Mask(["https://ann:s%40cret@host/simple", "https://host/simple?token=abc123", "https://t0ken@host/"])
    assert mask("GET https://ann:s%40cret@host/simple/x") == "GET https://****@host/simple/x"
    for secret in ("s%40cret", "s@cret", "token=abc123", "t0ken"):
        assert secret not in mask(f"failed with {secret}!")
    assert mask("see https://bob:pw@other/x") == "see https://****@other/x"
    assert mask("\x1b[31mred\x07") == " [31mred"


# --- what is removed -----------------------------------------------------------------------------------------------


def found(name: str, size: int, idle_s: float = 9999, *, is_in_use: bool = False) -> Found:
    return Found(name, size, idle_s, is_in_use)


def test_the_least_recently_used_go_until_the_limit_is_kept() -> None:
    three = [found("new", 4 * GB), found("mid", 4 * GB), found("old", 4 * GB)]
    assert choose(three, 0, 12 * GB, None) == (set(), False)
    assert choose(three, 0, 11 * GB, None) == ({"old"}, False)
    assert choose(three, 0, 4 * GB, None) == ({"mid", "old"}, False)


def test_downloads_go_before_an_environment_does() -> None:
    two = [found("new", 4 * GB), found("old", 4 * GB)]
    assert choose(two, 3 * GB, 9 * GB, None) == (set(), True)
    assert choose(two, GB, 9 * GB, None) == (set(), False)


def test_one_in_use_or_used_just_now_stays_whatever_the_limit() -> None:
    two = [found("now", 4 * GB, tidy.RECENT_S - 1), found("used", 4 * GB, is_in_use=True), found("old", GB)]
    assert choose(two, 0, 0, 0.0) == ({"old"}, True)


def test_what_was_not_used_for_long_goes_even_below_the_limit() -> None:
    two = [found("new", GB, 3600), found("old", GB, 90 * 86400)]
    assert choose(two, 0, 100 * GB, 30 * 86400) == ({"old"}, False)


# --- places --------------------------------------------------------------------------------------------------------


def whole(place: Place, name: str, **more: Any) -> Path:
    folder = Path(place.environment(name))
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/bin/sh")
    record = {"name": name, "folder": str(folder), "python": str(folder / "bin" / "python"), "packages": [], **more}
    durable.write_json(str(folder / "made.json"), record)
    return folder


def test_only_what_is_recorded_here_with_an_interpreter_is_an_environment(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    assert place.made("e1") is None
    folder = whole(place, "e1")
    assert place.made("e1") is not None
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/no/such/python3.4")  # the system's Python was upgraded
    assert place.made("e1") is None
    moved = whole(place, "e2", folder="/elsewhere/environments/e2")
    assert place.made("e2") is None
    (moved / "made.json").unlink()
    assert place.made("e2") is None
    assert place.names() == ["e1", "e2"]


def test_leftovers_of_this_machine_are_abandoned_once_the_lock_is_ours(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    place.prepare()
    ours = Path(place.new_folder("e1"))
    theirs = Path(place.environment("e1.othermachine.00.making"))
    for folder in (ours, theirs):
        folder.mkdir()
    assert machine_id() in ours.name
    assert sorted(place.half("e1")) == sorted([str(ours), str(theirs)])
    assert place.half("e") == []
    assert place.is_abandoned(str(ours))
    assert not place.is_abandoned(str(theirs))  # a maker there may still live


def test_folders_that_a_package_made_read_only_are_deleted_too(tmp_path: Path) -> None:
    inner = tmp_path / "top" / "read-only"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    inner.chmod(0o500)
    delete(str(tmp_path / "top"))
    assert not (tmp_path / "top").exists()
