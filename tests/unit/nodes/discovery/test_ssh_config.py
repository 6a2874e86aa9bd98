"""The machines in an ssh configuration, found as ssh itself reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.features.discovery.sources import ssh_config_hosts


@pytest.fixture
def ssh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".ssh"
    folder.mkdir()
    return folder


def hosts(folder: Path, text: str) -> list[str]:
    (folder / "config").write_text(text)
    return ssh_config_hosts(folder / "config")


def test_plain_names_are_machines_in_the_order_of_the_file(ssh_folder: Path) -> None:
    text = "Host gpu2 gpu1\n  HostName 10.0.0.2\nHost gpu1 cpu\nHost lab-*\nHost * !gpu1\nHost gpu?\n"
    assert hosts(ssh_folder, text) == ["gpu2", "gpu1", "cpu"]


def test_what_can_be_no_host_is_no_machine(ssh_folder: Path) -> None:
    assert hosts(ssh_folder, 'Host "q q" a;b me@x gpu:22 -x gpu1 fe80::1\n') == ["gpu1", "fe80::1"]


def test_spelling_does_not_matter(ssh_folder: Path) -> None:
    text = '# Host commented\nhOsT=one\nHOST = two\n\tHost\t"three"\r\nHost four # the last\nHost\nHost "open\n'
    assert hosts(ssh_folder, text) == ["one", "two", "three", "four"]


def test_a_login_for_git_is_no_machine(ssh_folder: Path) -> None:
    text = "Host forge\n  HostName forge.example\n  User git\nHost gpu1\n  User ann\n"
    assert hosts(ssh_folder, text) == ["gpu1"]


def test_a_match_block_belongs_to_no_host(ssh_folder: Path) -> None:
    assert hosts(ssh_folder, "Host gpu1\nMatch user git\n  User git\n") == ["gpu1"]


def test_included_files_are_found_below_the_users_ssh_folder(ssh_folder: Path, tmp_path: Path) -> None:
    (ssh_folder / "lab").mkdir()
    (ssh_folder / "lab" / "b.conf").write_text("Host b\nInclude more\n")
    (ssh_folder / "lab" / "a.conf").write_text("Host a\n")
    (ssh_folder / "more").write_text("Host nested\n")
    (tmp_path / "elsewhere").write_text("Host absolute\n")
    text = f"Include */*.conf missing\nInclude {tmp_path}/elsewhere\nInclude ~/elsewhere\nHost last\n"
    assert hosts(ssh_folder, text) == ["a", "b", "nested", "absolute", "last"]


def test_a_file_elsewhere_includes_from_the_users_ssh_folder_too(ssh_folder: Path, tmp_path: Path) -> None:
    (ssh_folder / "more").write_text("Host right\n")
    (tmp_path / "more").write_text("Host wrong\n")
    (tmp_path / "own_config").write_text("Include more\n")
    assert ssh_config_hosts(tmp_path / "own_config") == ["right"]


def test_a_file_that_includes_itself_ends(ssh_folder: Path) -> None:
    assert hosts(ssh_folder, "Host one\nInclude config\nHost two\n") == ["one", "two"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00Host", b"Host \xe9t\xe9\n", b"Include /\nInclude .\n"])
def test_what_cannot_be_read_is_no_error(ssh_folder: Path, content: bytes) -> None:
    (ssh_folder / "config").write_bytes(content)
    assert len(ssh_config_hosts(ssh_folder / "config")) <= 1
    assert ssh_config_hosts(ssh_folder / "nothing") == []
