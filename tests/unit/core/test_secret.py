"""What looks secret is hidden; what does not is shown as it is."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.secrets import HIDDEN, is_secret, looks_secret, masked, masked_command, without_passwords

SECRET_WORDS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "PASSPHRASE", "PWD", "PAT", "KEY", "AUTH", "AUTHORIZATION"),
    *("DSN", "CREDENTIAL", "CREDENTIALS", "APIKEY", "ACCESSKEY", "AUTHTOKEN", "DBPASS", "DBPWD", "KEYS", "TOKENS"),
)
HARMLESS_WORDS = (
    *("PATH", "PATTERN", "PATCH", "PATIENCE", "AUTHOR", "AUTHORITY", "KEYBOARD", "KEYWORD", "TOKENIZERS", "PASSED"),
    *("PASSIVE", "COMPASS", "BYPASS", "MONKEY", "COMPAT", "DEPTH", "LR", "HOME", "USER", "LANG", "DEBUG", "SECRETARY"),
    *("CUDA", "NCCL", "SOCKET", "IFNAME", "OMP", "THREADS", "SEED", "EPOCHS", "HOST", "PORT", "RANK", "DSNAME"),
)
others = st.lists(st.sampled_from(HARMLESS_WORDS), max_size=3)
joins = st.sampled_from(["_", "-", ".", "camel"])
letters = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)


def joined(words: list[str], join: str) -> str:
    if join == "camel":
        return "".join([words[0].lower(), *(word.capitalize() for word in words[1:])])
    return join.join(words)


@given(others, st.sampled_from(SECRET_WORDS), others, joins, st.booleans(), st.booleans())
def test_a_name_with_a_secret_word_is_hidden_however_it_is_spelt(
    before: list[str], word: str, after: list[str], join: str, is_lower: bool, has_number: bool
) -> None:
    name = joined([*before, word, *after], join)
    name = name.lower() if is_lower and join != "camel" else name
    name += "2" if has_number and not after else ""
    if name not in ("PWD", "pwd"):
        assert looks_secret(name), name
        assert masked([(name, "hush")]) == {name: HIDDEN}


@given(st.lists(st.sampled_from(HARMLESS_WORDS), min_size=1, max_size=4), joins, st.text(max_size=20))
def test_a_name_without_one_is_shown(words: list[str], join: str, value: str) -> None:
    name = joined(words, join)
    assert not looks_secret(name), name
    assert "://" in value or masked([(name, value)]) == {name: value}


@pytest.mark.parametrize(
    "name",
    [
        *("PWD", "OLDPWD", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SSH_AUTH_SOCK", "GIT_ASKPASS", "XAUTHORITY"),
        *("TOKENS_PER_BATCH", "tokens-budget", "keysCount"),
        *("max_tokens", "NUM_TOKENS", "total-keys", "TOKENIZERS_PARALLELISM", "patience", "GIT_AUTHOR_NAME"),
    ],
)
def test_these_are_no_secrets(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *(f"MY_{word}" for word in SECRET_WORDS),
        *("GITHUB_PAT", "MYSQL_PWD", "SENTRY_DSN", "SSH_KEY_PASSPHRASE", "BASIC_AUTH", "HTTP_AUTHORIZATION"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "githubPat", "env.API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"),
        *("HF_TOKEN", "ACCESS_TOKENS", "MAX_TOKEN", "OAUTH_CLIENT", "pwd_db", "Proxy-Authorization"),
    ],
)
def test_these_are(name: str) -> None:
    assert looks_secret(name)


passwords = st.text(string.ascii_letters + string.digits + "@/:?#%!$&*+,;=-_.~", min_size=1, max_size=30)


@given(st.sampled_from(["postgres", "https", "redis+ssl", "amqp", "s3"]), letters, passwords, letters)
def test_a_password_in_an_address_is_hidden_under_any_name(scheme: str, user: str, password: str, host: str) -> None:
    secret = f"S3cret{password}"
    value = f"at {scheme}://{user}:{secret}@{host}/db?x=1 and more"
    if "://" not in secret:
        assert "S3cret" not in without_passwords(value)
        assert without_passwords(value).endswith(f"@{host}/db?x=1 and more")
        assert is_secret("DATABASE_URL", value)
        assert "S3cret" not in str(masked([("DATABASE_URL", value)]))


@pytest.mark.parametrize(
    "value",
    [
        *("tcp://10.0.0.1:29500", "http://proxy:8080/a@b", "ssh://git@github.com/x.git", "git@github.com:x/y.git"),
        *("a@b.c", "file:///data/x@2", "https://user@host/x", "see http://h/p and a@b", "s3://b/key:with@signs", ""),
    ],
)
def test_an_address_without_a_password_is_shown(value: str) -> None:
    assert without_passwords(value) == value
    assert not is_secret("ADDRESS", value)


def test_several_addresses_are_each_without_their_password() -> None:
    text = "http://u:one@h,redis://:two@i:6379 https://ghp_0123456789abcdef@github.com/x"
    assert without_passwords(text) == "http://u:***@h,redis://:***@i:6379 https://***@github.com/x"


def test_a_command_is_recorded_without_its_secrets() -> None:
    command = "env HF_TOKEN=a run.py --password=b --api-key c --lr 3 --auth --fast -p x --url http://u:d@h --max-keys 5"
    hidden = "env HF_TOKEN=*** run.py --password=*** --api-key *** --lr 3 --auth --fast -p x --url http://u:***@h"
    assert masked_command(command.split()) == [*hidden.split(), "--max-keys", "5"]


@pytest.mark.parametrize(
    ("command", "recorded"),
    [
        (["sh", "-c", "HF_TOKEN=a b.py; rm -r c"], ["sh", "-c", "HF_TOKEN=*** b.py; rm -r c"]),
        (["bash", "-lc", "A=1 x --key='b c'\"d\" e && f"], ["bash", "-lc", "A=1 x --key=*** e && f"]),
        (["sh", "-c", "x --password 'b c' --lr 3"], ["sh", "-c", "x --password *** --lr 3"]),
        (["x", "DB_PASSWORD=b c", "d"], ["x", "DB_PASSWORD=***", "d"]),
        (["curl", "-H", "Authorization: Bearer a"], ["curl", "-H", "Authorization: ***"]),
        (["sh", "-c", "curl -H 'X-Api-Key: a' http://b/c"], ["sh", "-c", "curl -H 'X-Api-Key: ***' http://b/c"]),
    ],
)
def test_a_secret_in_a_command_hides_itself_and_nothing_after_it(command: list[str], recorded: list[str]) -> None:
    assert masked_command(command) == recorded


@pytest.mark.parametrize("piece", ["a.", "--a ", "a:", '"', "TOKEN=", 'a="', "-a '", "TOKEN=\\", 'a="b '])
def test_a_long_command_takes_no_long_time(piece: str) -> None:
    masked_command([f"x {piece * (60_000 // len(piece))}"])


@pytest.mark.parametrize("piece", ["a.", "a://b:", "://", "@", "x://y:z", "a:b@", "https://a"])
def test_a_long_value_takes_no_long_time(piece: str) -> None:
    """A value has up to 128 KiB; quadratic time would be minutes."""
    without_passwords(f"x://{piece * (100_000 // len(piece))}@")
    without_passwords(piece * (100_000 // len(piece)) + "://@")
