"""How far environments are: heard by all who wait, and not forgotten when a link breaks."""

from __future__ import annotations

import contextlib

from ugro.features.environments.model import EnvProgress
from ugro.features.environments.service.making import UnderWay
from ugro.kernel.support.errors import Unreachable

KEY = ("n1", "env")


def test_who_joins_hears_at_once_how_far_it_is() -> None:
    under_way, heard = UnderWay(), list[EnvProgress]()
    with under_way.following(KEY, lambda progress: None) as making:
        making.tell(EnvProgress("installing", 3, 7))
        with under_way.following(KEY, heard.append):
            assert heard == [EnvProgress("installing", 3, 7)]
            assert under_way.in_words(["n1"]) == "making the Python environment on n1: 3 of 7 packages"
        assert under_way.in_words(["n1"]) is not None, "one still waits for it"
    assert under_way.in_words(["n1"]) is None


def broken_off(under_way: UnderWay, key: tuple[str, str]) -> float:
    with contextlib.suppress(Unreachable), under_way.following(key, lambda progress: None) as making:
        making.tell(EnvProgress("installing"))
        raise Unreachable("the link broke")
    return making.moved_at


def test_what_was_done_until_the_link_broke_counts_but_not_without_end() -> None:
    under_way = UnderWay()
    assert under_way.moved_at(["n1"]) == 0
    moved_at = [broken_off(under_way, KEY) for _ in range(20)]
    assert under_way.moved_at(["n1"]) == moved_at[9], "a node that fails each time makes no progress"
    assert under_way.moved_at(["n2"]) == 0
    with under_way.following(KEY, lambda progress: None):
        pass
    assert under_way.moved_at(["n1"]) == moved_at[9]
    assert broken_off(under_way, KEY) == under_way.moved_at(["n1"]), "it was finished since"


def test_resolving_on_this_machine_says_nothing_of_a_node() -> None:
    under_way = UnderWay()
    broken_off(under_way, ("n1", ""))
    assert under_way.moved_at(["n1"]) == 0
