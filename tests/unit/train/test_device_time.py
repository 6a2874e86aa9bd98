"""Times on a device that works behind the host's back, and its memory: a stand-in for the hardware says what it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ugro.train import surroundings as start
from ugro.train.balance import Balance
from ugro.train.failures import Room
from ugro.train.group import Group
from ugro.train.local_course import LocalStepping, Tally
from ugro.train.local_exchange import Flight, Format
from ugro.train.parallel.way import Company, synchronised
from ugro.train.rules.balance import Balancer, Batch
from ugro.train.rules.shares import Mode
from ugro.train.samples import Progress, Schedule, Slice
from ugro.train.stepping import Stepping
from ugro.train.surroundings import Surroundings
from ugro.train.telemetry import History, Moments, Word, phases
from ugro.train.trial import Trial, Wish

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


class Stream:
    """A device's stream, and the host's time beside it. What is asked of it begins when all before it is done."""

    lag = 0

    def __init__(self) -> None:
        self.host = 0.0
        self.done_at = 0.0  # when the device has done all that it was asked so far

    def work(self, seconds: float) -> None:
        """The host asks for it, and goes on at once."""
        self.done_at = max(self.done_at, self.host) + seconds

    def now(self) -> Any:
        return max(self.done_at, self.host)

    def has_come(self, moment: Any) -> bool:
        return bool(moment <= self.host)

    def wait(self, moment: Any) -> None:
        self.host = max(self.host, moment)

    def between(self, earlier: Any, later: Any) -> float:
        return float(later - earlier)

    def kept(self, loss: Any) -> Any:
        return loss


class Late:
    """An exchange as NCCL does it: to wait for it tells the stream to wait, and not the host."""

    def __init__(self, stream: Stream, arrives_at: float) -> None:
        self.stream, self.arrives_at = stream, arrives_at

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.stream.done_at = max(self.stream.done_at, self.arrives_at)


def group() -> Group:
    return Group(Surroundings.of({}), torch.device("cpu"))


def test_an_exchange_takes_as_long_as_the_device_waits_for_it() -> None:
    stream = Stream()
    flight = Flight([torch.zeros(2)], Format(1.0, frozenset({0})), None, stream)
    flight.add([0], torch.ones(2), Late(stream, arrives_at=5.0))
    stream.work(2.0)  # the next round goes on meanwhile
    assert [one.tolist() for one in flight.wait()] == [[1.0, 1.0]]
    assert (flight.seconds, flight.exposed_s) == (5.0, 3.0)


def test_a_round_takes_as_long_as_the_device_computes() -> None:
    stream = Stream()
    stepping = LocalStepping(group(), History(stream), Balance(("gpu0",), None), Progress())
    stepping.tally = Tally(stepping.now())
    stream.work(4.0)
    assert stepping.own_s() == 4.0


def test_a_device_that_is_busy_does_not_wait_for_data() -> None:
    stream = Stream()
    stepping = Stepping(group(), History(stream), Balance(("gpu0",), None), Progress())
    waited = []
    for busy_s in (3.0, 0.5):
        stream.work(busy_s)  # of the step before
        stepping.fetching()
        stream.host += 1.0
        stepping.fetched(Slice(0, (1,), 1, 1, 1, [0]))
        moments = stepping.begin()
        moments.ready = stepping.now()
        waited.append(phases(stream, moments).data_s)
        stream.host = stream.now()
    assert waited == [0.0, 0.5]


def test_waiting_in_a_synchronised_batch_norm_is_the_devices_and_no_time_of_its_own() -> None:
    stream = Stream()
    stepping = Stepping(group(), History(stream), Balance(("gpu0",), None), Progress())
    moments = stepping.begin()
    stream.work(1.0)
    begun = stepping.company.now()
    Late(stream, arrives_at=4.0).wait()
    stepping.company.waited(begun)
    moments.ready = stepping.now()
    assert phases(stream, moments).own_s == 1.0
    moments.pauses.append((0.0, 0.25))
    assert phases(stream, moments).own_s == 0.75


def test_gpus_get_the_layer_of_torch_with_the_same_weights() -> None:
    old = torch.nn.BatchNorm2d(3, eps=1e-4)
    company = Company(lambda: None, lambda since: None)
    new = synchronised(old, company, is_on_gpu=True)
    assert isinstance(new, torch.nn.SyncBatchNorm)
    assert new.weight is old.weight
    assert not isinstance(synchronised(old, company, is_on_gpu=False), torch.nn.SyncBatchNorm)


# --- memory -----------------------------------------------------------------------------------------------------


class Memory:
    """So many bytes for each sample, and for what is there always; others use the device, too."""

    def __init__(self, whole: int, fixed: int, per_sample: int, others: int = 0) -> None:
        self.whole, self.fixed, self.per_sample, self.others = whole, fixed, per_sample, others
        self._peak = fixed

    def usable(self) -> int:
        return self.whole - self.others

    def allocated(self) -> int:
        return self.fixed

    def peak(self) -> int:
        return self._peak

    def computed(self, samples: int) -> None:
        self._peak = max(self._peak, self.fixed + samples * self.per_sample)


def room_after(memory: Memory, *sizes: int) -> Room:
    room = Room(memory)
    for size in sizes:
        room.begin()
        memory.computed(size)
        room.end(size)
    return room


def test_free_memory_says_how_many_samples_fit_before_it_runs_out() -> None:
    assert room_after(Memory(10_000, 1_000, 100), 16).cap(granule=1) == 80
    assert room_after(Memory(10_000, 1_000, 100), 16).cap(granule=32) == 64
    assert room_after(Memory(10_000, 1_000, 100, others=4_000), 16).cap(granule=1) == 44


def test_an_estimate_never_goes_below_what_was_held() -> None:
    assert room_after(Memory(10_000, 1_000, 100), 16, 85).cap(granule=8) == 85
    assert room_after(Memory(1_000, 950, 100), 3).cap(granule=8) == 3


def test_larger_steps_correct_an_estimate() -> None:
    memory = Memory(10_000, 1_000, 50)
    memory.computed(80)  # what compiles needs more, once
    room = Room(memory)
    room.begin()
    memory._peak += 1
    room.end(20)
    assert room.cap(granule=1) == 39
    room.begin()
    room.end(39)
    assert room.cap(granule=1) == 77


def test_a_cpu_has_no_estimate() -> None:
    room = Room(None)
    room.begin()
    room.end(10)
    assert room.cap(granule=1) is None


def word_after(memory: Memory, shares: tuple[int, ...], *, is_hooked: bool = True) -> Word:
    balance = Balance(("gpu0", "gpu1"), None)
    balancer = Balancer(Batch(sum(shares), balance.names), Mode.ADAPTIVE)
    balance.begin(balancer, Schedule(balancer.plan, 1))
    stepping = Stepping(group(), History(Stream()), balance, Progress())
    stepping.room = Room(memory)
    stepping.slice = Slice(0, shares, shares[0], 1, sum(shares), [0])
    stepping.begin()
    memory.computed(shares[0])
    if is_hooked:
        stepping.bucket(_LastBucket(), lambda state, bucket: None)
    else:
        stepping.backward_done()
    stepping.compression = heard = _Heard()
    stepping.finish()
    return heard.words[0]


class _Heard:
    words: Sequence[Word] = ()

    def observe(self, words: Sequence[Word], *, repeats: bool) -> None:
        self.words = words


class _LastBucket:
    def is_last(self) -> bool:
        return True

    def buffer(self) -> Any:
        return torch.ones(1)


def test_the_other_ranks_learn_of_an_estimate_and_that_it_is_one() -> None:
    word = word_after(Memory(10_000, 1_000, 100), (60, 60))
    assert (word.cap, word.is_cap_estimated) == (80, True)
    word = word_after(Memory(10_000, 1_000, 100), (60, 60), is_hooked=False)
    assert (word.cap, word.is_cap_estimated) == (80, True)
    word = word_after(Memory(100_000, 1_000, 100), (60, 60))
    assert (word.cap, word.is_cap_estimated) == (None, False), "there is room for the whole batch"


def test_a_trial_says_what_memory_is_free_and_not_what_there_is() -> None:
    trial = Trial(Wish(is_joint=False, parts=1, limit_s=1), group(), None)
    trial.device_memory = Memory(10_000, 1_000, 100, others=7_000)
    trial.end(0, 0, can_accumulate=False)
    assert trial._facts["memory_bytes"] == [[0, 0, 3_000]]


def test_moments_without_a_batch_have_no_time_for_data() -> None:
    assert phases(Stream(), Moments(0, begun=0.0, ready=2.0)).data_s == 0.0


def test_shares_of_gpus_are_multiples_of_eight_unless_the_script_or_a_small_batch_says_otherwise() -> None:
    assert start.granule(torch.device("cuda"), 256, 3) == 8
    assert start.granule(torch.device("cuda"), 16, 3) == 1
    assert start.granule(torch.device("cpu"), 256, 3) == 1
