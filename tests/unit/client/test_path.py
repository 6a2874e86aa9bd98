from __future__ import annotations

import pytest

from ugro.client.http import path_of
from ugro.kernel.access.operations import RevokeToken
from ugro.kernel.support.errors import NotFound


@pytest.mark.parametrize("word", ["", ".", "..", "/", "a/b", "../jobs"])
@pytest.mark.parametrize("kind", ["jobs", "tokens", "environments", "sweeps", "ray-clusters"])
def test_a_word_that_would_be_another_path_is_the_name_of_nothing(kind: str, word: str) -> None:
    with pytest.raises(NotFound, match="there is no ") as caught:
        path_of(kind, word)
    assert repr(word) in caught.value.message
    assert (caught.value.hint or "").startswith("see: ugro ")


def test_a_request_leads_to_no_other_path_either() -> None:
    for word in ("..", "a/b", ""):
        with pytest.raises(NotFound, match="there is no token "):
            RevokeToken(word).to_wire()
    assert RevokeToken("a b").to_wire() == ("DELETE", "/v1/tokens/a%20b", None)


def test_any_other_word_is_one_part_of_the_path() -> None:
    assert path_of("jobs", 12) == "/v1/jobs/12"
    assert path_of("jobs", "a b?c#d%e") == "/v1/jobs/a%20b%3Fc%23d%25e"
