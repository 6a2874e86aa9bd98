"""How a model is spread, as far as one process can tell: blocks, units of ranks, plans, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ugro.kernel.support.errors import UsageError
from ugro.train import group as frozen
from ugro.train.failures import SavedForBackward
from ugro.train.group import Group
from ugro.train.parallel.tensor import check_widths, plan_of, units_of
from ugro.train.parallel.way import Way, blocks_of, described, optimizer_bytes
from ugro.train.parallel.way import of_units as speeds_of_units
from ugro.train.samples import sizes
from ugro.train.surroundings import Surroundings
from ugro.train.telemetry import Word, of_units

# torch says once that it found no NumPy; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")

PLAN = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}


def model(width: int = 8, layers: int = 3) -> Any:
    from torch import nn

    made = nn.Module()
    made.first = nn.Linear(2, width)
    made.layers = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(layers)
    )
    made.last = nn.Linear(width, 1)
    return made


def test_blocks_are_the_repeated_modules_that_hold_the_most() -> None:
    from torch import nn

    made = model()
    assert blocks_of(made, None) == list(made.layers)
    assert blocks_of(nn.Linear(2, 2), None) == []
    assert blocks_of(made, made.layers[:2]) == list(made.layers[:2])
    assert blocks_of(made, nn.Sequential) == list(made.layers)
    assert blocks_of(made, [nn.Sequential, nn.Linear]) == [made.first, *made.layers, made.last], "and not their parts"


def test_blocks_that_are_not_in_the_model_are_refused() -> None:
    from torch import nn

    for wrong in (nn.Conv1d, model().layers, ["layers"]):
        with pytest.raises(UsageError, match="not part of the model"):
            blocks_of(model(), wrong)


def test_a_model_says_how_large_it_is() -> None:
    import torch

    made = model()
    block = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    rest = 4 * (2 * 8 + 8 + 8 + 1)
    record = described(made, "fsdp", None)
    assert (record["block_bytes"], record["rest_bytes"]) == (block, rest)
    assert record["parameter_bytes"] == record["gradient_bytes"] == 3 * block + rest
    optimizer = torch.optim.AdamW(made.parameters())
    assert optimizer_bytes({"model": made, "optimizer": optimizer}) == 0
    sum(one.sum() for one in made.parameters()).backward()
    optimizer.step()
    assert optimizer_bytes({"optimizer": optimizer}) == pytest.approx(2 * record["parameter_bytes"], rel=0.05)


def test_what_layers_keep_for_backward_is_counted_without_the_parameters() -> None:
    import torch

    made = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    saved = SavedForBackward()
    saved.begin(samples=8)
    made(torch.randn(8, 100)).sum().backward()
    saved.end()
    assert saved.per_sample == 4 * (100 + 50)  # the input, and what tanh gave, which the last layer keeps as well


def test_ranks_of_a_node_are_a_unit() -> None:
    assert units_of(["a", "a", "b", "b"]) == (0, 0, 1, 1)
    assert units_of(["a"] * 4, size=2) == (0, 0, 1, 1)
    assert units_of(["a", "a", "a", "a", "b", "b"], size=2) == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("nodes", "size", "problem", "hint"),
    [
        (["a", "b"], None, "several ranks on a node", "fsdp"),
        (["a", "a", "b"], None, "unequal numbers of ranks: a has 2, b has 1", "fsdp"),
        (["a", "a", "a", "a", "b", "b"], None, "unequal numbers", "size=2 is possible"),
        (["a", "a", "a"], 2, "2 ranks cannot split", "size=3"),
        (["a", "a"], "2", "cannot split", "size=2"),
    ],
)
def test_nodes_that_cannot_split_a_model_are_told_what_is_possible(
    nodes: list[str], size: Any, problem: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        units_of(nodes, size)
    assert hint in str(caught.value.hint)


def test_a_plan_names_layers_that_exist_and_can_be_split() -> None:
    assert plan_of(model(), PLAN) == PLAN
    for wrong, words in (
        (None, "needs a plan"),
        ({"layers.*.7": "colwise"}, "has no layers"),
        ({"layers.*.0": "across"}, "cannot be split in the way"),
    ):
        with pytest.raises(UsageError, match=words):
            plan_of(model(), wrong)
    with pytest.raises(UsageError, match=r"width of 14, which 4 ranks cannot split"):
        check_widths(model(width=7), PLAN, 4)


def test_the_plan_of_a_model_leaves_out_layers_that_share_their_weights() -> None:
    made = model()
    made._tp_plan = {**PLAN, "last": "colwise_rep", "first": "something else"}
    assert plan_of(made, None) == {**PLAN, "last": "colwise_gather_output"}
    made.again = type(made.last)(8, 1)
    made.again.weight = made.last.weight
    assert plan_of(made, None) == PLAN
    with pytest.raises(UsageError, match="shares its weights"):
        plan_of(made, {"last": "colwise"})


def test_a_unit_is_as_slow_as_the_slowest_of_its_ranks() -> None:
    words = [Word(own_s=0.2, cap=5), Word(own_s=0.3, cap=4, is_clean=False), Word(own_s=0.1), Word(stops=True)]
    assert of_units(words, (0, 1, 2, 3)) == words
    first, second = of_units(words, (0, 0, 1, 1))
    assert (first.own_s, first.cap, first.is_clean, first.stops) == (0.3, 4, False, False)
    assert (second.own_s, second.cap, second.stops) == (0.1, None, True)


def test_the_speeds_of_ranks_add_up_in_their_units() -> None:
    assert speeds_of_units((1, 1, 0.5, 0.25), (0, 0, 1, 1)) == (2, 0.75)
    assert speeds_of_units((), (0, 0, 1, 1)) == ()


def test_ranks_that_need_equally_many_parts_have_some_without_samples() -> None:
    assert sizes(3, 5, exactly=True) == [1, 1, 1, 0, 0]
    assert sizes(7, 2, exactly=True) == sizes(7, 2) == [4, 3]


def test_measuring_layers_leaves_their_statistics_as_they_were() -> None:
    """Each rank measures as often as it can in a second: statistics of the beginning would differ."""
    import torch

    from ugro.train.parallel.pipeline.cut import Cut, Meter

    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(3)]
    made = torch.nn.Sequential(*layers)
    before = {name: one.clone() for name, one in made.named_buffers()}
    group = Group(Surroundings.of({}), torch.device("cpu"))
    found = Meter(Cut(made, {}), group, lambda output: output.square().mean()).measured((torch.randn(8, 4),))
    assert all(one.forward_s > 0 for one in found)
    assert all(torch.equal(one, before[name]) for name, one in made.named_buffers())
    assert all(parameter.grad is None for parameter in made.parameters())


def test_layers_that_thaw_in_what_a_library_has_put_in_ddp_are_an_error_and_others_may_freeze() -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    group = Group(Surroundings.of({}), torch.device("cpu"))
    group.begin_alone()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(requires_grad=False)
        way = Way(DistributedDataParallel(model), group)
        way.follow()
        model[1].bias.requires_grad_(requires_grad=False)
        way.follow()
        way.expect_unchanged()
        model[0].requires_grad_(requires_grad=True)
        with pytest.raises(UsageError, match="layers were thawed after the model was put in DDP"):
            way.follow()
        way.release()
    finally:
        distributed.destroy_process_group()


def test_what_a_script_tells_ddp_to_ignore_stays_ignored_when_layers_thaw() -> None:
    from torch import nn

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    ignored = "_ddp_params_and_buffers_to_ignore"
    setattr(model, ignored, ["1.bias"])
    frozen.ignore(model, ["0.weight", "0.bias"])
    assert getattr(model, ignored) == ["1.bias", "0.weight", "0.bias"]
    frozen.ignore(model, ["0.bias"])
    assert getattr(model, ignored) == ["1.bias", "0.bias"]
    assert [hasattr(one, "_ddp_ignored") for one in model[0].parameters()] == [False, True]
