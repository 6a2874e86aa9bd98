"""Whether it pays to share work out: what a few timed items say about all of them, on each place, with a reason.

The time on a place is its start, and then the longest of: the work over its slots, the items through the driver, the
data over its link, and the longest single item.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ugro.core.estimate import Bound, Estimate, Place, Prediction, Sample
from ugro.core.support.quantity import format_duration, format_size

_WORTH = 1.2  # times faster than a simpler place
_WORTH_S = 1.0  # and so many seconds sooner


def predict(sample: Sample, place: Place) -> Prediction:
    mean_s, longest_s = fmean(sample.costs_s), max(sample.costs_s)
    each_s = mean_s / place.speed + place.slot_item_s
    slots = max(1, min(place.slots, sample.items))
    data_s = sample.data_bytes / place.bytes_per_s if place.bytes_per_s else 0.0
    tail_s = longest_s / place.speed / 2 if slots > 1 else 0.0
    parts = {
        Bound.WORK: sample.items * each_s / slots + tail_s + (data_s if place.is_here else 0.0),
        Bound.DRIVER: sample.items * place.driver_item_s,
        Bound.DATA: data_s,
        Bound.LONGEST: longest_s / place.speed if sample.items else 0.0,
    }
    bound = max(parts, key=lambda one: parts[one])
    return Prediction(place, place.start_s + parts[bound], bound)


def estimate(sample: Sample, places: Sequence[Place]) -> Estimate:
    """The first place is one core of this machine, without a pool."""
    predictions = tuple(predict(sample, place) for place in places)
    best = 0
    for number, one in enumerate(predictions):
        least = predictions[best].seconds
        if one.seconds * _WORTH <= least and one.seconds + _WORTH_S <= least:
            best = number
    return Estimate(sample, predictions, best, _reason(sample, predictions, best))


def _reason(sample: Sample, predictions: Sequence[Prediction], best: int) -> str:
    work = f"{format_duration(sample.work_s)} of work in {sample.items:,} item{'' if sample.items == 1 else 's'}"
    chosen, alone = predictions[best], predictions[0]
    if best == 0:
        others = [one for one in predictions[1:] if one.seconds < alone.seconds]
        if not others:
            return f"{work}: do it here, in a plain loop; {_why_not(predictions)}"
        quickest = min(others, key=lambda one: one.seconds)
        gain = format_duration(alone.seconds - quickest.seconds)
        return f"{work}: do it here, in a plain loop; {quickest.place.name} would save only {gain}"
    times = alone.seconds / chosen.seconds
    return f"{work}: {times:.1f} × on {chosen.place.name}{_bound_of(sample, chosen)}"


def _bound_of(sample: Sample, chosen: Prediction) -> str:
    if chosen.bound is Bound.DATA and chosen.place.bytes_per_s:
        speed = f"{8 * chosen.place.bytes_per_s / 1e9:.2g} Gbit/s"
        return f"; the data's {format_size(sample.data_bytes)} over {speed} are the bound"
    if chosen.bound is Bound.DRIVER:
        return "; the items themselves are the bound: put more work into each"
    if chosen.bound is Bound.LONGEST:
        return f"; the longest item, {format_duration(max(sample.costs_s))}, is the bound"
    return ""


def _why_not(predictions: Sequence[Prediction]) -> str:
    if len(predictions) < 2:
        return "there is no other place"
    least = min(predictions[1:], key=lambda one: one.seconds)
    share = least.place.start_s / least.seconds if least.seconds else 0.0
    if share > 0.5:
        return f"{least.place.name} needs {format_duration(least.place.start_s)} to start"
    return f"sharing the items out to {least.place.name} costs more than it saves"
