from __future__ import annotations

import pytest

from tests.unit.config.test_load import config_of
from ugro.features.quotas.config import FairShareSection, QuotaSection
from ugro.features.quotas.model import Limits, Quotas
from ugro.kernel.support.errors import ConfigError

TEXT = """\
nodes: [gpu1]
quotas:
  default: {gpus: 4, gpu_hours_per_day: 48, max_priority: normal, max_time_limit: 1d}
  users:
    ann: {gpus: 8, max_time_limit: null}
  groups:
    students: {members: [bob, eve], gpus: 6, queued_jobs: 100}
    lab: {unix_group: gpu, cpus: 32}
fair_share:
  half_life: 14d
  weights: {ann: 2, bob: 0.5}
"""


def made(text: str) -> Quotas:
    return config_of(text).section(QuotaSection).made_with({"gpu": frozenset({"carl"})}.__getitem__)


def test_a_user_has_the_default_but_for_the_keys_of_its_own() -> None:
    quotas = made(TEXT)
    [own] = quotas.pools_of("zoe")
    assert own.limits == Limits(gpus=4, gpu_hours_per_day=48.0, max_priority=50, max_time_limit=86400.0)
    [own] = quotas.pools_of("ann")
    assert own.limits == Limits(gpus=8, gpu_hours_per_day=48.0, max_priority=50)


def test_members_have_the_limits_of_their_groups_together() -> None:
    quotas = made(TEXT)
    own, group = quotas.pools_of("bob")
    assert str(group) == "group students"
    assert group.members == {"bob", "eve"}
    assert group.limits == Limits(gpus=6, queued_jobs=100)
    assert own.limits.gpus == 4
    assert [str(pool) for pool in quotas.pools_of("carl")] == ["carl", "group lab"]


def test_shares() -> None:
    share = config_of(TEXT).section(FairShareSection).made_share()
    assert (share.half_life_s, share.weight("ann"), share.weight("zoe")) == (14 * 86400.0, 2.0, 1.0)


def test_without_the_section_there_are_no_quotas() -> None:
    assert not made("nodes: [gpu1]")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("quotas: {default: {gpu: 4}}", "cluster.yaml:2: quotas.default.gpu: unknown key", "did you mean gpus?"),
        ("quotas: {default: {gpus: -1}}", "quotas.default.gpus: expected a whole number from 0", "gpus: 4"),
        ("quotas: {users: {ann: {gpus: many}}}", "quotas.users.ann.gpus: expected a whole number", "gpus: 4"),
        ("quotas: {groups: {lab: {gpus: 4}}}", "quotas.groups.lab: it has no members", "give members or unix_group"),
        ("quotas: {groups: {lab: {members: ann}}}", "quotas.groups.lab.members: expected a list of users", "ann"),
        ("quotas: {default: {max_priority: high}}", "expected urgent, normal, batch, or a whole number", "normal"),
        ("quotas: {default: {max_time_limit: 0}}", "max_time_limit: expected a duration", "1d"),
        ("quotas: {default: {gpu_hours_per_day: lots}}", "gpu_hours_per_day: expected a number", "48"),
        ("fair_share: {half_life: 0}", "fair_share.half_life: expected a duration", "half_life"),
        ("fair_share: {weights: {ann: 0}}", "fair_share.weights.ann: expected a number over 0", "ann"),
        ("fair_share: {weights: {ann: .nan}}", "fair_share.weights.ann: expected a number over 0", "ann"),
        ("quotas: 4", "quotas: expected a map of keys to values", ""),
    ],
)
def test_an_error_names_the_file_the_line_and_the_key(line: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(f"nodes: [gpu1]\n{line}\n")
    assert message in str(caught.value)
    assert "cluster.yaml:2" in str(caught.value)
    assert hint in (caught.value.hint or "")
