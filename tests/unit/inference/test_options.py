from __future__ import annotations

import pytest

from ugro.features.services.inference.loading import halves
from ugro.features.services.inference.options import parse
from ugro.kernel.support.errors import UsageError

REPLICA = {"UGRO_HOST": "10.0.0.7", "UGRO_PORT": "8701", "UGRO_SERVICE": "chat", "UGRO_MODEL": "/m/model"}


def test_a_replica_needs_no_options() -> None:
    found = parse([], {**REPLICA, "UGRO_FOLDER_BASE": "/m/base", "UGRO_SERVICE_KEY_FILE": "/run/key"})
    assert (found.host, found.port, found.name, found.model) == ("10.0.0.7", 8701, "chat", "/m/model")
    assert (found.base, found.key_file) == ("/m/base", "/run/key")


def test_options_win_over_the_environment() -> None:
    words = ["--host", "127.0.0.1", "--port", "0", "--name", "x", "--model", "a/b", "--max-batch", "3", "--queue", "1"]
    found = parse(words, REPLICA)
    assert (found.host, found.port, found.name, found.model) == ("127.0.0.1", 0, "x", "a/b")
    assert (found.limits.max_batch, found.limits.queue) == (3, 1)
    assert not found.trusts_remote_code
    assert not found.downloads


def test_a_model_is_called_as_its_folder() -> None:
    assert parse(["--model", "runs/7/tiny/", "--port", "1"], {}).name == "tiny"
    assert parse(["--factory", "mine:make", "--port", "1"], {}).name == "make"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model"),
        (["--model", "m"], "no port"),
        (["--model", "m", "--port", "70000"], "is not a port"),
        (["--model", "m", "--port", "http"], "is not a port"),
        (["--model", "m", "--port", "1", "--max-batch", "0"], "whole number above 0"),
        (["--model", "m", "--port", "1", "--batch-wait-ms", "-1"], "at least 0"),
        (["--model", "m", "--port", "1", "--grace", "nan"], "at least 0"),
        (["--model", "m", "--port", "1", "--task", "sing"], "invalid choice"),
        (["--model", "m", "--port", "1", "--modle", "x"], "unrecognized arguments"),
    ],
)
def test_a_wrong_command_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(words, {})


def test_threads_are_halved_until_one_is_left() -> None:
    assert [halves(most) for most in (1, 2, 8, 11)] == [[1], [2, 1], [8, 4, 2, 1], [11, 5, 2, 1]]
