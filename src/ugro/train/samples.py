"""Splits a batch into parts of its samples. Where these are is learnt where batches are made, and never guessed.

A loader collates one sample twice, and three times. What has grown by one has an entry for each sample; what is the
same belongs to all of them, such as weights of classes or a mask. In what a script passes on, the same tensors are
found again, by their values. Nothing that fits only by its size is cut: a sequence may be as long as its batch.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train.rules.balance import Plan

Path = tuple[Any, ...]  # of something in a batch: keys, places and names of fields
Rule = int | str | None  # the dimension of the samples, LIST, or a reason why it cannot be cut; None: it stays whole
Cutter = Callable[[int, int], Any]

LIST = ""  # one item for each sample
REORDERED = "collate_fn puts the samples into an order of its own, and their weights would be mixed up"
_FEW, _MORE = 2, 3
_PAIRS = 8  # of samples, whose order is looked at
_HERE = "change it in the function that gets a part of the batch: parts are cut from what the loader handed out"
_COLLATE = "collate_fn=list hands out samples as they are; put them together in the function that gets some of them"
_NO_LOADER = "take batches from run.loader, which knows where the samples are"


def sizes(samples: int, count: int, *, exactly: bool = False) -> list[int]:
    """Ranges as equal as whole samples allow; with ``exactly`` so many, also if some are empty."""
    count = max(1, count if exactly else min(samples, count))
    return [samples // count + (number < samples % count) for number in range(count)]


class Collate:
    """The collate function of a loader. Batches come with the rules by which they can be cut, or why they cannot."""

    def __init__(self, collate: Callable[[Any], Any], *, is_weighted: bool) -> None:
        """``is_weighted``: samples do not count the same, so their order matters."""
        self._collate, self._is_weighted = collate, is_weighted
        self._rules: dict[Path, Rule] | str | None = None

    def __call__(self, samples: Any) -> tuple[Any, dict[Path, Rule] | str]:
        if self._rules is None:
            is_list = isinstance(samples, list | tuple) and len(samples) > 0
            self._rules = self._learnt(samples) if is_list else "the dataset returns whole batches"
        return self._collate(samples), self._rules

    def _learnt(self, samples: Sequence[Any]) -> dict[Path, Rule] | str:
        """The random numbers of the script stay as they are."""
        found: dict[Path, Rule] = {}
        before = _chance()
        try:
            _compare((), self._tried([samples[0]] * _FEW), self._tried([samples[0]] * _MORE), found)
            is_reordered = self._is_weighted and any(self._swaps(samples[0], one) for one in samples[1 : 1 + _PAIRS])
        except Exception as error:  # noqa: BLE001
            return f"collating a sample {_FEW} or {_MORE} times failed ({type(error).__name__}: {error})"
        finally:
            _restore(before)
        return REORDERED if is_reordered else found

    def _tried(self, samples: Sequence[Any]) -> Any:
        """Of copies, since collating may change samples, and each time with the same random numbers."""
        before = _chance()
        found = self._collate([copy.deepcopy(sample) for sample in samples])
        _restore(before)
        return found

    def _swaps(self, one: Any, other: Any) -> bool:
        """Two samples come out the same in either order, and are not the same."""
        ordered = self._tried([one, other])
        return _is_same(ordered, self._tried([other, one])) and not _is_same(ordered, self._tried([one, one]))


class Handed:
    """A batch as a loader handed it out, whatever the script does to it afterwards."""

    def __init__(self, batch: Any, rules: dict[Path, Rule] | str, samples: int) -> None:
        self.samples = samples
        self.is_reordered = rules == REORDERED
        self._reason = rules if isinstance(rules, str) else ""
        self.left_out = 0 if isinstance(rules, str) else samples - max(_counts((), batch, rules), default=samples)
        self._things = [] if isinstance(rules, str) else list(_things((), batch, rules, samples))
        self._lists = [one for one, rule in self._things if rule == LIST]
        self._arrays = [(one, rule) for one, rule in self._things if _is_array(one)]

    def expect_complete(self) -> None:
        """Raises if collating has left out samples: ranks are weighted by what they were given."""
        if self.left_out > 0:
            raise UsageError(
                f"collate_fn has left out {self.left_out} of {self.samples} samples: the loss of this rank would count "
                "as the mean over all of them",
                hint="take them out of the dataset before, or let collate_fn put others in their place",
            )

    def expect_all(self, batch: Any) -> None:
        """Raises if the script passes on fewer samples: a step is about all of them, and weights them so."""
        counts = {self._count(one) for one in _leaves(batch) if _is_array(one) and len(one.shape)}
        if len(counts) == 1 and (count := counts.pop()) is not None and count < self.samples:
            raise UsageError(
                f"the loader handed out {self.samples} samples, and the step gets {count} of them",
                hint="give it all of them; what is left out in the function that computes the loss counts as there",
            )

    def _count(self, one: Any) -> int | None:
        """Of samples, if it has the shape of a tensor of this batch but for their number."""
        counts = [
            int(one.shape[rule])
            for other, rule in self._arrays
            if isinstance(rule, int)
            and len(one.shape) == len(other.shape)
            and all(one.shape[at] == size for at, size in enumerate(other.shape) if at != rule)
        ]
        return max(counts, default=None)

    def cutter(self, batch: Any) -> Cutter:
        """Cuts parts from what the script passes on."""
        if self._reason:
            raise UsageError(f"the batch cannot be divided: {self._reason}", hint=_COLLATE)
        return self._cutter((), batch)

    def _cutter(self, path: Path, one: Any) -> Cutter:
        if _is_array(one):
            rule = self._rule(path, one)
            if rule is None:
                return lambda begin, end: one
            before = (slice(None),) * rule
            return lambda begin, end: one[(*before, slice(begin, end))]
        if isinstance(one, list | tuple) and any(_is_same(one, other) for other in self._lists):
            return lambda begin, end: one[begin:end]
        children = _children(one)
        if children is None:
            self._check(path, one)
            return lambda begin, end: one
        cutters = {key: self._cutter((*path, key), child) for key, child in children.items()}
        return lambda begin, end: _rebuilt(one, {key: cut(begin, end) for key, cut in cutters.items()})

    def _rule(self, path: Path, one: Any) -> int | None:
        alike = [(other, rule) for other, rule in self._arrays if tuple(one.shape) == tuple(other.shape)]
        found = {rule for other, rule in alike if _is_alias(one, other)}
        found = found or {rule for other, rule in alike if _is_equal(one, other)}
        if not found:
            raise UsageError(
                f"the batch cannot be divided: {_name(path)} ({_shape(one)}) is not what the loader handed out",
                hint=_HERE,
            )
        if len(found) > 1:
            raise UsageError(
                f"the batch cannot be divided: {_name(path)} ({_shape(one)}) may be one of two tensors", hint=_HERE
            )
        rule = found.pop()
        if isinstance(rule, str):
            raise UsageError(f"the batch cannot be divided: {_name(path)} {rule}", hint=_COLLATE)
        return rule

    def _check(self, path: Path, one: Any) -> None:
        """Of what is no tensor, and holds none that we know of."""
        for other, rule in self._things:
            if rule and isinstance(rule, str) and (one is other or (_is_plain(one) and _is_same(one, other))):
                raise UsageError(f"the batch cannot be divided: {_name(path)} {rule}", hint=_COLLATE)
        if one is None or isinstance(one, bool | str | bytes):
            return
        if not any(_is_same(one, other) for other, _ in self._things):
            why = "may be about all samples" if _is_plain(one) else "may hold samples"
            raise UsageError(
                f"the batch cannot be divided: {_name(path)} is a {type(one).__name__}, which {why}", hint=_HERE
            )


class Parts:
    """What a step computes, in one or several parts."""

    def __init__(self, batch: Any, handed: Handed | None) -> None:
        """``handed``: what the loader handed out last; None: it comes from elsewhere, and stays whole."""
        self.batch = batch
        self.samples = 1 if handed is None else handed.samples
        self._handed = handed
        self._cutter: Cutter | None = None
        if handed is not None:
            handed.expect_all(batch)

    def part(self, begin: int, end: int) -> Any:
        if end - begin == self.samples:
            return self.batch
        self.expect_divisible()
        assert self._cutter is not None
        return self._cutter(begin, end)

    def expect_divisible(self) -> None:
        """Raises if nobody knows where the samples are."""
        if self._cutter is None:
            if self._handed is None:
                raise UsageError("a batch that is not from run.loader cannot be divided", hint=_NO_LOADER)
            self._cutter = self._handed.cutter(self.batch)


# --- learning ---------------------------------------------------------------------------------------------------


def _compare(path: Path, few: Any, more: Any, found: dict[Path, Rule]) -> None:
    if _is_array(few) and _is_array(more):
        found[path] = _compared(few, more)
    elif type(few) is not type(more):
        found[path] = f"is a {type(few).__name__} with {_FEW} samples and a {type(more).__name__} with {_MORE}"
    elif isinstance(few, list | tuple) and (len(few), len(more)) == (_FEW, _MORE):
        found[path] = LIST
    elif (first := _children(few)) is not None and (second := _children(more)) is not None:
        if list(first) != list(second):
            found[path] = f"has {len(first)} items with {_FEW} samples and {len(second)} with {_MORE}"
            return
        for key, child in first.items():
            _compare((*path, key), child, second[key], found)
    elif few is more or (_is_plain(few) and few == more):
        found[path] = None
    else:
        found[path] = f"is a {type(few).__name__} that depends on the number of samples"


def _compared(few: Any, more: Any) -> Rule:
    one, other = tuple(few.shape), tuple(more.shape)
    if one == other:
        return None if _is_equal(few, more) else "has values that depend on the number of samples"
    places = [place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
    if len(one) == len(other) and len(places) == 1 and (one[places[0]], other[places[0]]) == (_FEW, _MORE):
        return places[0]
    return f"is {_shape(few)} with {_FEW} samples and {_shape(more)} with {_MORE}"


def _things(path: Path, one: Any, rules: dict[Path, Rule], samples: int) -> Iterator[tuple[Any, Rule]]:
    """Everything in a batch, as it is now, with its rule."""
    if path in rules:
        rule = rules[path]
        if rule == LIST:
            is_fit = isinstance(one, list | tuple) and len(one) == samples
            yield (list(one), LIST) if is_fit else (one, "has not one item for each sample")
            return
        if _is_array(one):
            if isinstance(rule, int) and (len(one.shape) <= rule or one.shape[rule] != samples):
                rule = f"is {_shape(one)} with {samples} samples"
            one = one.detach() if hasattr(one, "detach") else one  # its shape is that of now
        yield one, rule
        return
    children = _children(one)
    if children is None:
        yield one, "is new in this batch"
        return
    for key, child in children.items():
        yield from _things((*path, key), child, rules, samples)


def _counts(path: Path, one: Any, rules: dict[Path, Rule]) -> Iterator[int]:
    """How many samples there are in each part of a batch. A part may have more entries than there are samples: if one
    sample has one box, a list of all boxes looks like one of samples."""
    rule = rules.get(path)
    if isinstance(rule, int) and _is_array(one) and len(one.shape) > rule:
        yield int(one.shape[rule])
    elif rule == LIST and isinstance(one, list | tuple):
        yield len(one)
    elif path not in rules and (children := _children(one)) is not None:
        for key, child in children.items():
            yield from _counts((*path, key), child, rules)


# --- batches ----------------------------------------------------------------------------------------------------


def _children(batch: Any) -> dict[Any, Any] | None:
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _leaves(batch: Any) -> Iterator[Any]:
    children = _children(batch)
    if children is None:
        yield batch
    else:
        for child in children.values():
            yield from _leaves(child)


def _rebuilt(batch: Any, children: dict[Any, Any]) -> Any:
    if isinstance(batch, Mapping):
        return children if type(batch) is dict else type(batch)(children)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*children.values())
    if isinstance(batch, list | tuple):
        return type(batch)(children.values())
    return dataclasses.replace(batch, **children)


def _is_array(one: Any) -> bool:
    return hasattr(one, "shape") and hasattr(one, "dtype") and hasattr(one, "__getitem__")


def _is_plain(one: Any) -> bool:
    return one is None or isinstance(one, bool | int | float | complex | str | bytes)


def _is_same(one: Any, other: Any) -> bool:
    """Also on another device, in another precision, in a tuple instead of a list."""
    if one is other:
        return True
    if _is_array(one) or _is_array(other):
        return _is_array(one) and _is_array(other) and tuple(one.shape) == tuple(other.shape) and _is_equal(one, other)
    first, second = _children(one), _children(other)
    if first is not None and second is not None:
        return list(first) == list(second) and all(_is_same(child, second[key]) for key, child in first.items())
    return _is_plain(one) and type(one) is type(other) and bool(one == other)


def _is_equal(one: Any, other: Any) -> bool:
    """``one`` may have been moved or converted; both have the same shape."""
    import torch

    if _is_alias(one, other):
        return True
    try:
        one = torch.as_tensor(one).detach().cpu()
        other = torch.as_tensor(other).detach().to("cpu", one.dtype)
        return bool(((one == other) | ((one != one) & (other != other))).all())
    except (TypeError, ValueError, RuntimeError):  # texts, or nested and sparse tensors
        return False


def _is_alias(one: Any, other: Any) -> bool:
    """The same memory in the same order."""
    import torch

    if not all(isinstance(each, torch.Tensor) and each.layout == torch.strided for each in (one, other)):
        return one is other
    return (one.data_ptr(), one.stride(), one.dtype, one.device) == (
        other.data_ptr(), other.stride(), other.dtype, other.device
    )  # fmt: skip


def _shape(one: Any) -> str:
    return " × ".join(map(str, one.shape)) or "a number"


def _name(path: Sequence[Any]) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


# --- chance -----------------------------------------------------------------------------------------------------


def _chance() -> tuple[Any, Any, Any]:
    import torch

    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore(state: tuple[Any, Any, Any]) -> None:
    import torch

    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


# --- sampler ----------------------------------------------------------------------------------------------------------
# Selects the samples of a rank in each step: every sample once per epoch, also when shares change or a run resumes.
#
# All ranks use one order, from the seed and the epoch, and a cursor that advances by a global batch each step. Each
# rank takes a slice of the batch according to the plan of that step.


_LARGEST_SEED = 2**63
_DUMMY_SAMPLES = 2  # one would be too few for a BatchNorm


@dataclass(slots=True)
class Schedule:
    """Plans, each with the first step that it applies to.

    When a plan is made, ``lead`` steps are already being loaded, the same number on every rank.
    """

    first: Plan
    lead: int = 0
    total_at: Callable[[int], int] | None = None  # the size of a step's batch, where that is not always the same
    _plans: deque[tuple[int, Plan]] = field(default_factory=deque)

    def change(self, plan: Plan, after_step: int) -> int:
        """Adds a plan; returns the first step that it applies to."""
        holds_from = after_step + 1 + self.lead
        self._plans.append((holds_from, plan))
        return holds_from

    def at(self, step: int) -> Plan:
        """The plan of a step. Steps must be requested in order."""
        while self._plans and self._plans[0][0] <= step:
            self.first = self._plans.popleft()[1]
        return self.first


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of one global batch."""

    step: int
    shares: tuple[int, ...]
    own: int
    micro_batches: int
    cursor: int  # after this batch
    indices: list[int]
    weights: Weights | None = None
    most_micro_batches: int = 1  # of all ranks

    @property
    def total(self) -> int:
        return sum(self.shares)

    def part(self, begin: int, samples: int) -> float:
        """How much some of this rank's samples count in the whole batch."""
        if self.weights is None:
            return samples / self.total
        return math.fsum(self.weights.own[begin : begin + samples]) / self.weights.total if self.weights.total else 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each sample counts, such as its number of tokens, where not all count the same."""

    own: list[float]  # of this rank's samples
    total: float  # of all samples of the batch


@dataclass(slots=True)
class Progress:
    """The progress of a run; ``cursor`` counts the samples of the epoch that steps have used."""

    seed: int = 0
    epoch: int = 0
    cursor: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the samples of an epoch, and its batches."""

    samples: int
    global_batch: int
    is_shuffled: bool = True
    drops_last: bool = False
    weights: Any = field(default=None, compare=False)  # a tensor with the weight of each sample, or None

    @property
    def end(self) -> int:
        return self.samples - self.samples % self.global_batch if self.drops_last else self.samples

    @property
    def steps(self) -> int:
        return -(-self.end // self.global_batch)

    def of(self, seed: int, epoch: int) -> Any:
        import torch

        if not self.is_shuffled:
            return torch.arange(self.samples)
        made = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % _LARGEST_SEED)
        return torch.randperm(self.samples, generator=made)


def slices(order: Order, schedule: Schedule, progress: Progress, rank: int) -> Iterator[Slice]:
    """The rest of the epoch."""
    permutation = order.of(progress.seed, progress.epoch)
    cursor, step = progress.cursor, progress.step
    while cursor < order.end:
        wanted = order.global_batch if schedule.total_at is None else schedule.total_at(step)
        total = min(wanted, order.end - cursor)
        plan = schedule.at(step)
        shares = plan.share_of(total)
        begin = cursor + sum(shares[:rank])
        indices = permutation[begin : begin + shares[rank]].tolist()
        # A rank without samples of a short last batch still takes part, with weight zero.
        dummies = permutation[cursor : cursor + min(_DUMMY_SAMPLES, total)].tolist()
        weights = _weights(order, permutation[cursor : cursor + total], indices)
        cursor += total
        yield Slice(
            step, shares, shares[rank], plan.micro_batches[rank], cursor, indices or dummies, weights,
            max(plan.micro_batches),
        )  # fmt: skip
        step += 1


def _weights(order: Order, batch: Any, own: list[int]) -> Weights | None:
    """Every rank knows the whole batch, so nothing is exchanged for it."""
    if order.weights is None:
        return None
    return Weights(order.weights[own].tolist(), math.fsum(order.weights[batch].tolist()))
