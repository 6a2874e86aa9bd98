"""What of a model changes in a round, how it travels, and what becomes of it."""

from __future__ import annotations

import pytest

from ugro.train.local_course import OuterStep
from ugro.train.local_exchange import Report, Values, scale_of
from ugro.train.rules.sync import Outer

torch = pytest.importorskip("torch")


def values(*contents: object) -> Values:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(content)) for content in contents])
    made = Values(model)
    made.agree()
    return made


def test_a_change_is_what_happened_since_the_ranks_agreed() -> None:
    made = values([1.0, 2.0])
    made.tensors[0] += 0.5
    assert made.change().tensors[0].tolist() == [0.5, 0.5]
    assert made.change().largest == 0.5


def test_values_much_smaller_than_the_largest_travel_in_full_precision() -> None:
    made = values([0.0, 0.0], [0.0, 0.0])
    made.tensors[0] += torch.tensor([1.0, 0.3])
    made.tensors[1] += torch.tensor([1.1e-12, 2.3e-12])
    assert made.change().exact == (1,)


def test_changes_that_are_no_numbers_and_double_precision_travel_as_they_are() -> None:
    made = values([0.0], [0.0])
    made.tensors[0] += float("nan")
    assert made.change().exact == (0,)
    double = Values(torch.nn.Linear(1, 1).double())
    double.agree()
    assert double.change().exact == (0, 1)


def test_a_scale_changes_no_digit_and_does_not_overflow() -> None:
    for largest in (1e-20, 3e-5, 0.7, 1.0, 123.0):
        scaled = torch.tensor(largest) * scale_of(largest)
        assert scaled.half().isfinite()
        assert float(scaled / scale_of(largest)) == float(torch.tensor(largest))
    assert scale_of(0.0) == 1.0


def test_what_was_computed_meanwhile_stays_when_the_average_arrives() -> None:
    made = values([10.0])
    made.tensors[0] += 4.0  # sent
    sent = made.change().tensors
    made.tensors[0] += 1.0  # meanwhile
    made.move([torch.tensor([3.0])], sent, is_agreement=False)
    assert made.common[0].tolist() == [13.0]
    assert made.tensors[0].tolist() == [14.0]
    made.move([torch.tensor([2.0])], None, is_agreement=False)  # a round without this rank
    assert made.tensors[0].tolist() == [16.0]
    assert made.change().tensors[0].tolist() == [1.0]


def test_an_agreement_leaves_no_difference() -> None:
    made = values([0.1, 0.7])
    made.tensors[0] += 0.123
    sent = made.change().tensors
    made.move([one / 3 for one in sent], sent, is_agreement=True)
    assert made.tensors[0].tolist() == made.common[0].tolist()


def test_the_outer_step_is_torchs_nesterov_and_leaves_statistics_alone() -> None:
    outer, weight = OuterStep(Outer.NESTEROV), torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    theirs, mine = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True), weight.detach().clone()
    for change in ([0.5, 0.1], [0.2, -0.4], [-0.1, 0.3]):
        weight.grad = -torch.tensor(change)
        theirs.step()
        step, statistics = outer.update([torch.tensor(change), torch.tensor([7.0])], ["weight"])
        mine += step
        assert statistics.tolist() == [7.0]
    assert mine.tolist() == pytest.approx(weight.tolist())
    again = OuterStep(Outer.NESTEROV)
    again.restore(outer.state(), "cpu")
    changes = [torch.tensor([0.1, 0.1])]
    assert again.update(changes, ["weight"])[0].tolist() == outer.update(changes, ["weight"])[0].tolist()


def test_the_momentum_of_a_parameter_stays_its_own_when_others_thaw_or_freeze() -> None:
    outer, change = OuterStep(Outer.NESTEROV), torch.ones(2)
    outer.update([change], ["last"])
    first, last = outer.update([change, change], ["first", "last"])
    assert first.tolist() == pytest.approx([0.7 * 1.9] * 2), "its first step"
    assert last.tolist() == pytest.approx([0.7 * (1 + 0.9 * 1.9)] * 2)
    assert outer.update([change], ["first"])[0].tolist() == pytest.approx([0.7 * (1 + 0.9 * 1.9)] * 2)
    assert set(outer.state()) == {"first"}


def test_layers_that_thaw_are_exchanged_from_the_next_epoch_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[0].requires_grad_(requires_grad=False)
    made = Values(model)
    made.agree()
    assert made.names == ["1.weight", "1.bias"]
    model[0].requires_grad_()
    made.agree()
    with torch.no_grad():
        model[0].weight += 1.0
    assert made.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert made.change().tensors[0].tolist() == [[1.0]]


def test_statistics_are_found_where_a_module_puts_them_and_caches_are_not_exchanged() -> None:
    model = torch.nn.Module()
    model.register_buffer("mean", torch.zeros(1))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    made = Values(model)
    made.agree()
    model.mean = torch.ones(1)
    model.cache = torch.ones(3)
    assert [one.tolist() for one in made.change().tensors] == [[1.0]]
    made.return_to_common()
    assert model.mean.tolist() == [0.0]


def test_a_report_survives_its_way() -> None:
    report = Report(used=3, loss=0.25, exact=(1, 4), stops=True)
    assert Report.of(report.text()) == report
