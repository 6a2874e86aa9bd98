"""``store.yaml``: where the state is, and no password in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.kernel.store.address import PostgresAddress, make_address, read_address, write_address
from ugro.kernel.support.errors import ConfigError, UgroError
from ugro.kernel.support.state_dir import StateDir


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ugro@db.example/ugro",
        "postgres://ugro@db1:5432,db2:5433/ugro?target_session_attrs=read-write&sslmode=verify-full",
        "postgresql:///ugro?host=/run/postgresql",
    ],
)
def test_what_is_written_is_read_again(tmp_path: Path, url: str) -> None:
    home = StateDir(tmp_path)
    assert read_address(home) is None
    write_address(home, make_address(url, "~/secret"))
    found = read_address(home)
    assert found == PostgresAddress(url, Path("~/secret").expanduser())
    assert home.store.stat().st_mode & 0o077 == 0
    write_address(home, None)
    assert read_address(home) is None


@pytest.mark.parametrize(
    "text",
    [
        "url: postgresql://ugro:hunter2@db/ugro",
        "url: postgresql://db/ugro?user=ugro&password=hunter2",
        "url: mysql://db/hunter2",
        "url: postgresql:ugro",
        "url: [1, 2]",
        "url: postgresql://db/x\npasswort: hunter2",
        "url: postgresql://db/x\npassword_file: [hunter2]",
        "- hunter2",
        "{",
        "",
        "url: postgresql://[db/hunter2",
    ],
)
def test_a_mistake_is_one_error_without_the_password(tmp_path: Path, text: str) -> None:
    home = StateDir(tmp_path)
    home.store.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_address(home)
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"


def test_a_password_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "password"
    address = PostgresAddress("postgresql://db/x", file)
    with pytest.raises(UgroError, match="no such file"):
        address.password()
    file.write_text("hunter2\n")
    file.chmod(0o644)
    with pytest.raises(UgroError, match="others can read") as refused:
        address.password()
    assert refused.value.hint == f"chmod 600 {file}"
    file.chmod(0o600)
    assert address.password() == "hunter2"
