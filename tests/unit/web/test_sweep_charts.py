"""The decisions of a sweep's charts: places on axes, what a selection holds, the surface between trials."""

from __future__ import annotations

import pytest

from tests.rig.javascript import answer_of

AXES = """
import { Axis } from "/static/sweep/axes.js";
const log = new Axis({ name: "lr", kind: "float", log: true, low: 1e-4, high: 1 });
const whole = new Axis({ name: "layers", kind: "int", low: 2, high: 8 });
const choice = new Axis({ name: "opt", kind: "choice", values: ["sgd", "adam", "lion"] });
const flat = new Axis({ name: "same", kind: "float", low: 3, high: 3 });
const odd = new Axis({ name: "odd", kind: "float", log: true, low: 0, high: 1 });
answer({
  shares: [log.share(1e-2), whole.share(5), choice.share(1), flat.share(3), log.share(null), log.share(-1)],
  values: [log.value(0.5), whole.value(0.49), choice.value(0.99), log.value(0.001), log.value(0.999)],
  ranges: [
    ...[log.range(0.5, 0), choice.range(0.1, 0.9), choice.range(0.4, 0.5)],
    ...[choice.range(0.9, 0.97), whole.range(0, 1)],
  ],
  steps: [whole.stepped(8, 1), whole.stepped(2, 1), choice.stepped(0, 1), choice.stepped(2, 5), log.stepped(1e-4, -1)],
  texts: [choice.text(2), choice.text(null), log.text(0.01)],
  marks: [whole.marks(20), choice.marks(2), flat.marks(3), log.marks(5)],
  isLog: odd.isLog,
});
"""


def test_values_of_every_kind_have_a_place_on_their_axis() -> None:
    found = answer_of(AXES)
    assert found["shares"] == pytest.approx([0.5, 0.5, 0.5, 0.5, None, None])
    assert found["values"] == pytest.approx([1e-2, 5, 2, 1e-4, 1])
    assert found["ranges"] == [[1e-4, 0.01], [0, 2], [1, 1], [2, 2], [2, 8]]
    assert found["steps"] == pytest.approx([8, 3, 1, 2, 1e-4])
    assert found["texts"] == ["lion", "none", "0.01"]
    assert found["marks"][0] == [2, 3, 4, 5, 6, 7, 8]
    assert found["marks"][1] == [0, 2]
    assert found["marks"][2] == [3]
    assert found["marks"][3] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert found["isLog"] is False, "there is no logarithm of 0"


SELECTION = """
import { Axis } from "/static/sweep/axes.js";
import { Selection } from "/static/sweep/selection.js";
const axes = [
  new Axis({ name: "lr", kind: "float", low: 0, high: 1 }),
  new Axis({ name: "a=b&c", kind: "choice", values: ["x", "y"] }),
];
const stateOf = (number) => (number === 2 ? "failed" : "complete");
const trials = [[0.1, 0], [0.5, 1], [0.9, 1], [null, 1]].map((at, number) => ({ number, state: stateOf(number), at }));
const made = () => Object.assign(new Selection(), { axes });
const held = (one) => trials.filter((trial) => one.holds(trial)).map((trial) => trial.number);
const selection = made();
let changes = 0;
selection.addEventListener("change", () => (changes += 1));
const seen = [held(selection)];
for (const act of [
  () => selection.set("lr", [0.5, 0.95]),
  () => selection.set("lr", [0.5, 0.95]),
  () => selection.set("a=b&c", [0, 0]),
  () => selection.set("a=b&c", [0, 1]),
  () => selection.toggle("failed"),
]) {
  act();
  seen.push(held(selection));
}
const query = selection.written("smooth=1&brush.old=1..2");
const again = made();
again.read(query);
const bad = made();
bad.read("brush.lr=x..y&brush.a=b&brush.lr=");
const words = selection.words;
selection.clear();
const end = [selection.isEmpty, selection.written(query)];
answer({ seen, changes, query, again: held(again), words, bad: bad.isEmpty, end });
"""


def test_ranges_of_several_axes_combine_and_are_kept_in_the_address() -> None:
    found = answer_of(SELECTION)
    assert found["seen"] == [[0, 1, 2, 3], [1, 2], [1, 2], [], [1, 2], [1]]
    assert found["changes"] == 5, "the same range again is no change"
    assert found["query"] == "smooth=1&brush.lr=0.5..0.95&hide=failed"
    assert found["again"] == [1]
    assert found["words"] == "lr 0.5 to 0.95, not failed"
    assert found["bad"] is True, "nonsense in an address is no selection"
    assert found["end"] == [True, "smooth=1"]


SURFACE = """
import { contour, levels, places, surface, valueAt } from "/static/sweep/surface.js";
const points = [];
for (let at = 0; at < 200; at += 1) {
  const [x, y] = [((at * 7919) % 1009) / 1009, ((at * 104729) % 1013) / 1013];
  points.push({ x, y, value: x * x + y });
}
const xs = Array.from({ length: 30 }, (_, at) => (at + 0.5) / 30);
const free = { x: false, y: false };
const whole = surface(points, xs, xs, free);
const errors = whole.values.map((value, at) => Math.abs(value - (xs[at % 30] ** 2 + xs[Math.floor(at / 30)])));
const plane = { xs: [0, 0.5, 1], ys: [0, 1], values: [0, 0.5, 1, 0, 0.5, 1], distances: [] };
const twice = [{ x: 0, y: 0, value: 1 }, { x: 0, y: 0, value: 3 }, { x: 1, y: 1, value: 9 }];
const kinds = [{ x: 0.25, y: 0.1, value: 1 }, { x: 0.75, y: 0.1, value: 5 }];
answer({
  through: Math.max(...points.map((one) => Math.abs(valueAt(points, one.x, one.y).value - one.value))),
  range: [Math.min(...whole.values), Math.max(...whole.values)],
  given: [Math.min(...points.map((one) => one.value)), Math.max(...points.map((one) => one.value))],
  typical: [...errors].sort((left, right) => left - right)[errors.length >> 1],
  twice: valueAt(twice, 0, 0).value,
  kinds: surface(kinds, [0.25, 0.75, 0.9], [0.9], { x: true, y: false }).values,
  line: contour(plane, 0.25),
  none: [contour({ ...plane, values: [null, 0.5, 1, 0, 0.5, 1] }, 0.25), valueAt([], 0, 0).value],
  levels: levels(0, 1, 4),
  places: places(twice),
  far: valueAt([{ x: 0, y: 0, value: 1 }], 0.6, 0.8),
});
"""


def test_the_surface_goes_through_the_trials_and_never_beyond_them() -> None:
    found = answer_of(SURFACE)
    assert found["through"] < 1e-9
    assert found["given"][0] <= found["range"][0] <= found["range"][1] <= found["given"][1]
    assert found["typical"] < 0.03
    assert found["twice"] == 2, "trials at one place count equally"
    assert found["kinds"] == [1, 5, None], "nothing lies between two choices"
    assert found["line"] == [[0.25, 0, 0.25, 1]]
    assert found["none"] == [[], None]
    assert found["levels"] == [0.25, 0.5, 0.75]
    assert found["places"] == 2
    assert found["far"] == pytest.approx({"value": 1, "distance": 1})
