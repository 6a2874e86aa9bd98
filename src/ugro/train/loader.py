"""This rank's share of each batch; its size follows the plan."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ugro.kernel.support.errors import UsageError
from ugro.train.group import Group
from ugro.train.rules.shares import in_proportion
from ugro.train.samples import Collate, Handed, Order, Progress, Schedule, Slice, sizes, slices

# --- portions ---------------------------------------------------------------------------------------------------------
# Cuts this rank's part of an update into portions: what a library computes in one forward and backward pass.
#
# An update is what one step of the optimizer is about. All ranks know all of it, so they agree without an exchange.


_DUMMY_SAMPLES = 2  # of a rank without samples of its own; one would be too few for a BatchNorm


@dataclass(frozen=True, slots=True)
class Portion:
    indices: list[int]
    own: int  # samples that count; 0 if these only let the rank take part
    of: int  # samples of all ranks over which their common mean is taken
    is_first: bool  # of this rank's portions of the update
    is_last: bool
    slice: Slice  # the update, with the cursor after this portion

    @property
    def part(self) -> float:
        return self.own / self.of


def cut(slice_: Slice, at_once: int) -> list[Portion]:
    """Each has at most ``at_once`` samples; their number differs from rank to rank."""
    if not slice_.own:
        return [Portion(slice_.indices[:at_once], 0, slice_.total, True, True, slice_)]
    parts = sizes(slice_.own, -(-slice_.own // at_once))
    found, begin = [], 0
    for number, size in enumerate(parts):
        indices = slice_.indices[begin : begin + size]
        found.append(Portion(indices, size, slice_.total, number == 0, number + 1 == len(parts), slice_))
        begin += size
    return found


def iterations(order: Order, schedule: Schedule, progress: Progress, rank: int, accumulated: int) -> Iterator[Portion]:
    """The rest of the epoch, with ``accumulated`` portions per update on every rank.

    Each portion is a part of one batch of all ranks, the same batches that one process would get.
    """
    permutation = order.of(progress.seed, progress.epoch)
    cursor, step = progress.cursor, progress.step
    while cursor < order.end:
        plan = schedule.at(step)
        batches = _batches(cursor, order, accumulated)
        dealt = [in_proportion(end - begin, plan.shares) for begin, end in batches]
        shares = tuple(sum(of_rank) for of_rank in zip(*dealt, strict=True))
        for number, ((begin, end), of_batch) in enumerate(zip(batches, dealt, strict=True)):
            first = begin + sum(of_batch[:rank])
            indices = permutation[first : first + of_batch[rank]].tolist()
            dummies = permutation[begin : min(begin + _DUMMY_SAMPLES, end)].tolist()
            slice_ = Slice(step, shares, shares[rank], 1, end, [])
            is_last = number + 1 == len(batches)
            yield Portion(indices or dummies, of_batch[rank], end - begin, number == 0, is_last, slice_)
        cursor = batches[-1][1]
        step += 1


def _batches(cursor: int, order: Order, accumulated: int) -> list[tuple[int, int]]:
    """Of the update that ``cursor`` is in, those that are left."""
    size = order.global_batch // accumulated
    update_end = min(order.end, (cursor // order.global_batch + 1) * order.global_batch)
    found = []
    while cursor < update_end:
        end = min((cursor // size + 1) * size, update_end)
        found.append((cursor, end))
        cursor = end
    return found


# --- feed -------------------------------------------------------------------------------------------------------------
# Loads this rank's portions with the options of the script's own loader: its workers, its collate function.


OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


@dataclass(slots=True)
class _Indices:
    """For torch's loader, which may request some long before they are used."""

    make: Callable[[], Iterator[Portion]]
    handed_out: deque[Portion]
    count: Callable[[], int]

    def __iter__(self) -> Iterator[list[int]]:
        for portion in self.make():
            self.handed_out.append(portion)
            yield portion.indices

    def __len__(self) -> int:
        return self.count()


class Feed:
    """Portions with their batches, of one epoch each time."""

    def __init__(self, source: Any, make: Callable[[], Iterator[Portion]], count: Callable[[], int]) -> None:
        """``source`` is the script's loader; only its dataset and its options are used."""
        import torch
        from torch.utils.data import DataLoader

        options = {name: getattr(source, name) for name in OPTIONS if hasattr(source, name)}
        self._chance = torch.Generator()
        self._handed_out: deque[Portion] = deque()
        indices = _Indices(make, self._handed_out, count)
        self._torchs = DataLoader(source.dataset, batch_sampler=indices, generator=self._chance, **options)

    def epoch(self, seed: int) -> Iterator[tuple[Portion, Any]]:
        """``seed`` is the source of the loader processes' seeds: the script's own random numbers are not used."""
        self._handed_out.clear()
        self._chance.manual_seed(seed % 2**63)
        for batch in self._torchs:
            yield self._handed_out.popleft(), batch


# --- orders -----------------------------------------------------------------------------------------------------------
# The order in which a library's loader would use the samples, the same on every rank and when a run resumes.


_LARGEST_SEED = 2**63

Agree = Callable[[str], bool]  # whether all ranks have the same text


@dataclass(frozen=True, slots=True)
class Sampled(Order):
    """What a sampler of the script returns, drawn with a seed of the epoch."""

    sampler: Any = field(default=None, compare=False)
    agree: Agree | None = field(default=None, compare=False)

    def of(self, seed: int, epoch: int) -> Any:
        import torch

        found = torch.tensor(_drawn(self.sampler, seed, epoch), dtype=torch.int64)
        if len(found) != self.samples:
            raise UsageError(
                f"{_name(self.sampler)} returned {len(found)} samples instead of {self.samples}",
                hint="a sampler must return as many as its len() says",
            )
        if self.agree is not None and not self.agree(hashlib.sha256(found.numpy().tobytes()).hexdigest()):
            raise UsageError(
                f"{_name(self.sampler)} returns another order on each rank",
                hint="draw with torch's or Python's random numbers, or with the sampler's `generator`",
            )
        return found


def order_of(sampler: Any, global_batch: int, *, drops_last: bool, agree: Agree | None = None) -> Order:
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    if isinstance(sampler, DistributedSampler):  # a library's part for this rank; we deal the whole
        if (whole := getattr(sampler.dataset, "_sampler", None)) is not None:  # of a sampler, which Lightning wraps
            return order_of(whole, global_batch, drops_last=drops_last, agree=agree)
        return Order(len(sampler.dataset), global_batch, sampler.shuffle, drops_last)
    samples = _length(sampler)
    if type(sampler) is SequentialSampler:
        return Order(samples, global_batch, False, drops_last)
    if type(sampler) is RandomSampler and not sampler.replacement and samples == len(sampler.data_source):
        return Order(samples, global_batch, True, drops_last)
    return Sampled(samples, global_batch, True, drops_last, sampler=sampler, agree=agree)


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"{_name(sampler)} does not know how many samples there are, so they cannot be shared by speed",
            hint="use a dataset with a length",
        ) from None


def _drawn(sampler: Any, seed: int, epoch: int) -> list[int]:
    """Leaves the random numbers of the script as they were."""
    import torch

    number = (seed * 1_000_003 + epoch) % _LARGEST_SEED
    before, pythons = torch.get_rng_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(number)  # torch.manual_seed would change the GPUs' as well
        random.seed(number)
        if (own := getattr(sampler, "generator", None)) is not None:
            own.manual_seed(number)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        return [int(index) for index in sampler]
    except TypeError as error:
        raise UsageError(
            f"{_name(sampler)} does not return indices of samples",
            hint="a sampler of batches cannot be shared by speed",
        ) from error
    finally:
        torch.set_rng_state(before)
        random.setstate(pythons)


def _name(sampler: Any) -> str:
    return type(sampler).__name__


# --- loader -----------------------------------------------------------------------------------------------------------


class Course(Protocol):
    """What a run does around each batch."""

    progress: Progress

    def boundary(self) -> None: ...
    def fetching(self) -> None: ...
    def fetched(self, slice_: Slice, handed: Handed) -> None: ...
    def exhausted(self) -> None: ...


@dataclass(slots=True)
class _Batches:
    """Lists of indices for torch's loader, which may request some long before they are used."""

    make: Callable[[], Iterator[Slice]]
    handed_out: deque[Slice]
    steps: int

    def __iter__(self) -> Iterator[list[int]]:
        for slice_ in self.make():
            self.handed_out.append(slice_)
            yield slice_.indices

    def __len__(self) -> int:
        return self.steps


class Loader:
    def __init__(
        self, course: Course, dataset: Any, order: Order, schedule: Schedule, rank: int, options: dict[str, Any]
    ) -> None:
        import torch

        self._course = course
        self.order = order
        self.is_endless = False  # a trial ends by itself, and the script's epochs do not
        self.schedule, self.rank = schedule, rank
        self._handed_out: deque[Slice] = deque()
        self._latest: Any = None  # the batch that the script has
        self._is_outdated = False  # what was loaded ahead is for other ranks
        self._is_repeated = False  # the step of the latest batch did not take place
        batches = _Batches(
            lambda: slices(order, self.schedule, course.progress, self.rank), self._handed_out, order.steps
        )
        # Of torch's own random numbers, each epoch would take one more: also one that is resumed in its middle.
        self._chance = None if "generator" in options else torch.Generator()
        self._torchs = torchs(dataset, batches, order, {"generator": self._chance, **options})

    def __len__(self) -> int:
        return self.order.steps

    def __iter__(self) -> Iterator[Any]:
        yield from self._epoch()
        while self.is_endless:
            yield from self._epoch()

    def _epoch(self) -> Iterator[Any]:
        progress = self._course.progress
        if progress.cursor >= self.order.end:  # the script counts epochs itself
            progress.epoch, progress.cursor = progress.epoch + 1, 0
        batches = self._begun()
        is_first = True
        while True:
            # Not after the last batch: what the script does at the end of an epoch belongs to the epoch.
            if (not is_first and progress.cursor < self.order.end) or self.is_endless:
                self._course.boundary()
            is_first = False
            self._course.fetching()
            if self._is_outdated:
                batches = self._begun()
            try:
                batch, rules = next(batches)
            except StopIteration:
                break
            slice_ = self._handed_out.popleft()
            self._course.fetched(slice_, Handed(batch, rules, len(slice_.indices)))
            self._latest, self._is_repeated = batch, False
            yield batch
            # Also for a batch without a step.
            if not self._is_repeated:
                progress.cursor, progress.step = slice_.cursor, slice_.step + 1
        self._latest = None
        self._course.exhausted()

    def _begun(self) -> Iterator[Any]:
        """The rest of the epoch."""
        progress = self._course.progress
        self._is_outdated = False
        self._handed_out.clear()
        if self._chance is not None:  # from which the loader processes get their seeds
            self._chance.manual_seed(hash((progress.seed, progress.epoch, progress.cursor, self.rank)) % 2**63)
        return iter(self._torchs)

    # --- other ranks --------------------------------------------------------------------------------------------

    def regroup(self, rank: int, schedule: Schedule) -> None:
        self.rank, self.schedule, self._is_outdated = rank, schedule, True

    def again(self, batch: Any) -> Any:
        """The batch of the same step for the ranks that there are now, if ``batch`` is what the loader handed out.

        None if the script has made something else of it: then the loader hands it out next.
        """
        kind = _same(batch, self._latest)
        if kind is None:
            self._is_repeated = True
            return None
        slice_ = next(slices(self.order, self.schedule, self._course.progress, self.rank))
        dataset, indices = self._torchs.dataset, slice_.indices
        many = getattr(dataset, "__getitems__", None)
        samples = many(indices) if many is not None else [dataset[index] for index in indices]
        made, rules = self._torchs.collate_fn(samples)
        self._course.fetched(slice_, Handed(made, rules, len(indices)))
        return made if kind is object else kind(made)


def source(given: Any, global_batch: int | None, options: dict[str, Any]) -> tuple[Any, Order, dict[str, Any]]:
    """The dataset, the order of its samples, and torch's options for loading them."""
    rest = dict(options)
    weights = rest.pop("weights", None)
    if hasattr(given, "batch_sampler") and hasattr(given, "dataset"):  # a DataLoader, also torchdata's
        if rest:
            raise UsageError(f"{', '.join(rest)}: the DataLoader says it already", hint="say it there")
        dataset, order, rest = _source_of_loader(given, global_batch)
    else:
        dataset, order, rest = _source_of_dataset(given, global_batch, rest)
    return dataset, replace(order, weights=checked_weights(weights, len(dataset))), rest


def _source_of_dataset(given: Any, global_batch: int | None, rest: dict[str, Any]) -> tuple[Any, Order, dict[str, Any]]:
    _expect_numbered(given)
    for name, instead in (("batch_size", "global_batch=, for all ranks together"), ("batch_sampler", "sampler=")):
        if name in rest:
            raise UsageError(f"run.loader makes the batches itself: it takes no {name}", hint=instead)
    if global_batch is None:
        raise UsageError("run.loader needs the size of a batch of all ranks together", hint="global_batch=512")
    sampler, drops_last = rest.pop("sampler", None), bool(rest.pop("drop_last", False))
    if sampler is not None and rest.pop("shuffle", None):
        raise UsageError("a sampler has an order of its own", hint="leave out shuffle=")
    shuffle = bool(rest.pop("shuffle", True))
    size = _checked(global_batch)
    if sampler is None:
        return given, Order(len(given), size, shuffle, drops_last), rest
    return given, order_of(sampler, size, drops_last=drops_last), rest


def _source_of_loader(given: Any, global_batch: int | None) -> tuple[Any, Order, dict[str, Any]]:
    from torch.utils.data import BatchSampler

    _expect_numbered(given.dataset)
    batches = given.batch_sampler
    kind = type(batches)
    if kind is not BatchSampler and kind.__module__ != "torchdata.stateful_dataloader.sampler":
        found = "no batch_size" if batches is None else f"a {kind.__name__}"
        raise UsageError(
            f"the DataLoader has {found}: ranks share batches of a known size",
            hint="give it a batch_size, and a sampler if the order matters",
        )
    # Each process of a plain DDP script loads a batch of this size. A loader that was given its batch sampler has
    # neither size nor order of its own.
    size = batches.batch_size * getattr(batches.sampler, "num_replicas", 1) if global_batch is None else global_batch
    options = {name: value for name in (*OPTIONS, "generator") if (value := getattr(given, name, None))}
    return given.dataset, order_of(batches.sampler, _checked(size), drops_last=batches.drop_last), options


def _checked(global_batch: Any) -> int:
    if not isinstance(global_batch, int) or isinstance(global_batch, bool) or global_batch < 1:
        raise UsageError(f"global_batch is not a positive number: {global_batch!r}")
    return global_batch


def _expect_numbered(dataset: Any) -> None:
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} hands out samples in a row: without numbers, ranks cannot share them unequally, "
            "use each of them once, and go on in the middle of an epoch",
            hint="use a dataset with len() and [number]; or take equal batches on each rank, without run.loader",
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"{type(dataset).__name__} has no len()", hint="ranks share the samples by their numbers")


def expect_one_order(order: Order, seed: int, texts: Callable[[str], list[str]]) -> None:
    """All ranks call it: of a sampler of the script, each has to get the same order, and again when it resumes."""
    if type(order) is Order:
        return
    first, again = (str(order.of(seed, 0).tolist()).encode() for _ in range(2))
    if first != again or len(set(texts(hashlib.sha256(first).hexdigest()))) > 1:
        raise UsageError(
            "the sampler returns another order each time, or on each rank",
            hint="draw with torch's or Python's random numbers or with its `generator`, and nothing else",
        )


def torchs(dataset: Any, batches: Any, order: Order, options: dict[str, Any]) -> Any:
    """torch's loader, whose batches come with the rules by which they can be cut."""
    from torch.utils.data import DataLoader, default_collate

    collate = Collate(options.get("collate_fn") or default_collate, is_weighted=order.weights is not None)
    return DataLoader(dataset, batch_sampler=batches, **{**options, "collate_fn": collate})


def _same(given: Any, handed_out: Any) -> type | None:
    """As what the script passed a batch on: unchanged, or taken apart and put into a list or tuple; None: changed."""
    if given is None or handed_out is None:
        return None
    if given is handed_out:
        return object
    if type(given) in (list, tuple) and type(handed_out) in (list, tuple) and len(given) == len(handed_out):
        return type(given) if all(one is other for one, other in zip(given, handed_out, strict=True)) else None
    return None


def common_lead(options: Mapping[str, Any], group: Group) -> int:
    """The largest of all ranks, which call it together."""
    own = lead(options.get("num_workers", 0), options.get("prefetch_factor"))
    return int(max(found for (found,) in group.numbers([float(own)])))


def lead(num_workers: int, prefetch_factor: int | None) -> int:
    """How many batches torch's loader requests ahead."""
    return num_workers * (2 if prefetch_factor is None else prefetch_factor)


def checked_weights(weights: Any, samples: int) -> Any:
    """A tensor on the CPU; None if all samples count the same."""
    if weights is None:
        return None
    import torch

    found = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if found.shape != (samples,):
        raise UsageError(f"{tuple(found.shape)} weights for {samples} samples", hint="give one number for each sample")
    if not bool((found.isfinite() & (found >= 0)).all()):
        raise UsageError("weights of samples are numbers that are not negative")
    return found
