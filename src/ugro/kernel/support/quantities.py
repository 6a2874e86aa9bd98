"""Parses and formats durations and sizes; formats energy, its cost, progress, signals and lists of names."""

from __future__ import annotations

import math
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

DURATION_EXAMPLES = "10, 500ms or 1h30m"
SIZE_EXAMPLES = "8GB, 512MiB or 1000"

# Longest first: the parts of "1h30m" must be in this order.
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DECIMAL = {unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb"))}
_BINARY = {unit: 1024**power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib", "pib"))}
_BYTES: dict[str, int] = _DECIMAL | _BINARY

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_PART = re.compile(rf"\s*({_NUMBER.pattern})\s*([A-Za-zµμ]+)\s*")
_MAX_TEXT = 64
_LONGEST_NUMBER = 18
# Far above any real duration or size, and still a 64-bit integer.
_MAX_VALUE = 10**18


def is_number(text: str) -> bool:
    """Whether ``int`` takes it and a database can hold it. For ``int``, "³" is none, although it is a digit."""
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER


def parse_duration(value: str | float) -> float:
    """Returns seconds; a number without a unit means seconds."""
    seconds = _seconds_in(value.strip()) if isinstance(value, str) else _plain(value)
    if seconds is None or not 0 <= seconds <= _MAX_VALUE:
        raise ValueError(f"expected a duration such as {DURATION_EXAMPLES}, got {_shown(value)}")
    return float(seconds)


def parse_size(value: str | float) -> int:
    """Returns bytes; a number without a unit means bytes. GB is 10^9 and GiB is 2^30."""
    size = _bytes_in(value.strip()) if isinstance(value, str) else _plain(value)
    if size is None or not 0 <= size <= _MAX_VALUE:
        raise ValueError(f"expected a size such as {SIZE_EXAMPLES}, got {_shown(value)}")
    return round(size)


def format_duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    # Rounded before the unit is chosen: 59.97 s is a minute, not "60.0 s".
    if round(seconds, 1) >= 60:
        return _long_duration(round(seconds))
    if seconds == 0 or round(seconds * 1000) >= 1000:
        return f"{_three_digits(seconds)} s"
    if seconds * 1000 >= 0.1:
        return f"{_three_digits(seconds * 1000)} ms"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_size(size_bytes: float) -> str:
    if size_bytes < 0:
        return f"-{format_size(-size_bytes)}"
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    amount = float(size_bytes)
    for unit in units:
        amount /= 1024
        if round(amount, 1) < 1024 or unit == units[-1]:
            break
    return f"{amount:.1f} {unit}"


def format_energy(joules: float) -> str:
    """In watt-hours, as on a bill."""
    wh = joules / 3600
    # Rounded before the unit is chosen: 999.96 Wh is a kilowatt-hour.
    if round(wh, 1) >= 1000:
        return f"{_three_digits(wh / 1000)} kWh" if wh < 1e6 else f"{wh / 1000:,.0f} kWh"
    if wh >= 0.1 or joules == 0:
        return f"{_three_digits(wh)} Wh"
    return f"{_three_digits(wh * 1000)} mWh" if wh >= 0.001 else f"{_three_digits(joules)} J"


def format_cost(cost: float, currency: str) -> str:
    """With cents; less than a cent with two digits that say something."""
    amount = f"{cost:,.2f}" if cost >= 0.01 or not cost else f"{cost:.2g}"
    return f"{amount} {currency}".rstrip()


def _seconds_in(text: str) -> float | None:
    if len(text) > _MAX_TEXT:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    total, position, units = 0.0, 0, list(_SECONDS)
    while part := _PART.match(text, position):
        unit = part[2].lower().replace("µ", "u").replace("μ", "u")
        if unit not in units:
            return None
        total += float(part[1]) * _SECONDS[unit]
        units = units[units.index(unit) + 1 :]
        position = part.end()
    return total if position == len(text) > 0 else None


def _bytes_in(text: str) -> float | None:
    if len(text) > _MAX_TEXT:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    part = _PART.fullmatch(text)
    if part is None or part[2].lower() not in _BYTES:
        return None
    factor = _BYTES[part[2].lower()]
    return float(part[1]) * factor if "." in part[1] else int(part[1]) * factor


def _plain(value: float) -> float | None:
    # In Python, bool is a subclass of int.
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _long_duration(seconds: int) -> str:
    """The two largest parts: 1d2h, 1h22m, 5m30s."""
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    first = next(index for index, (_, length) in enumerate(units) if seconds >= length)
    (unit, length), (small_unit, small_length) = units[first : first + 2]
    count, rest = divmod(round(seconds / small_length) * small_length, length)
    if first > 0 and count * length >= units[first - 1][1]:
        return f"1{units[first - 1][0]}"
    small = rest // small_length
    return f"{count}{unit}{small}{small_unit}" if small else f"{count}{unit}"


def _three_digits(amount: float) -> str:
    if amount == 0 or round(amount, 1) >= 100:
        return f"{amount:.0f}"
    return f"{amount:.1f}" if round(amount, 2) >= 10 else f"{amount:.2f}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value[:_MAX_TEXT]}"'
    is_huge = isinstance(value, int) and abs(value) > _MAX_VALUE
    return "a number too large" if is_huge else str(value)[:_MAX_TEXT]


# --- how far a transfer is --------------------------------------------------------------------------------------------
# Says it in words: bytes, files, speed and time left. The clock is an argument.


_WINDOW_S = 10.0  # the speed is that of the last seconds
_LEAST_S = 0.5  # below, a speed says nothing


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int
    bytes: int
    done_files: int
    files: int
    bytes_per_s: float | None = None  # None: not known yet

    @property
    def left_s(self) -> float | None:
        left = self.bytes - self.done_bytes
        return left / self.bytes_per_s if left > 0 and self.bytes_per_s else None

    def __str__(self) -> str:
        parts = [
            f"{format_size(self.done_bytes)} of {format_size(self.bytes)}",
            f"{self.done_files:,} of {self.files:,} file{'' if self.files == 1 else 's'}",
        ]
        if self.bytes_per_s is not None:
            parts.append(f"{format_size(self.bytes_per_s)}/s")
        if self.left_s is not None:
            parts.append(f"{_about(self.left_s)} left")
        return ", ".join(parts)


def together(parts: Iterable[Progress]) -> Progress:
    """Of transfers that go on at the same time."""
    found = list(parts)
    rates = [one.bytes_per_s for one in found if one.bytes_per_s is not None]
    return Progress(
        sum(one.done_bytes for one in found),
        sum(one.bytes for one in found),
        sum(one.done_files for one in found),
        sum(one.files for one in found),
        sum(rates) if rates else None,
    )


class Speed:
    """Bytes per second, over the last seconds."""

    def __init__(self, now: float) -> None:
        self._seen = deque([(now, 0)])

    def note(self, now: float, done_bytes: int) -> None:
        self._seen.append((now, done_bytes))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_S:
            self._seen.popleft()

    def at(self, now: float) -> float | None:
        (began, before), (_, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - began) if now - began >= _LEAST_S else None


def _about(seconds: float) -> str:
    """Whole seconds: more would pretend to a precision that there is none."""
    return f"{max(1, round(seconds))} s" if seconds < 59.5 else format_duration(round(seconds))


# --- names of signals -------------------------------------------------------------------------------------------------


KNOWN = frozenset(int(one) for one in signal.Signals)


def signal_name(number: int) -> str:
    """Also for real-time signals between the first and the last, which have no name."""
    return signal.Signals(number).name if number in KNOWN else f"signal {number}"


# --- parts of sentences -----------------------------------------------------------------------------------------------


# A sentence with more names is hard to read.
_MAX_NAMES = 4
_JOBS = re.compile(r"\bjobs? (?P<ids>\d+(?:, \d+)*(?: and \d+\b(?! more))?)(?: and (?P<more>\d+ more))?")
PRIVATE_JOB = "a private job"


def count_of(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def in_words(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def names(parts: Sequence[str]) -> str:
    """The first few, and how many more."""
    if len(parts) <= _MAX_NAMES:
        return in_words(parts) if parts else "nothing"
    shown = parts[: _MAX_NAMES - 1]
    return in_words([*shown, f"{len(parts) - len(shown)} more"])


def jobs(ids: Sequence[int]) -> str:
    return ("job " if len(ids) == 1 else "jobs ") + names([str(job) for job in ids])


def without_numbers(text: str, is_hidden: Callable[[int], bool]) -> str:
    """The same, for somebody who must not know of some of the jobs that it names."""
    return _JOBS.sub(lambda found: _without_numbers(found, is_hidden), text)


def _without_numbers(found: re.Match[str], is_hidden: Callable[[int], bool]) -> str:
    ids = [int(one) for one in re.findall(r"\d+", found["ids"])]
    shown = [str(one) for one in ids if not is_hidden(one)]
    if len(shown) == len(ids):
        return found[0]
    more = [found["more"]] if found["more"] else []
    private = PRIVATE_JOB if len(shown) + 1 == len(ids) else f"{len(ids) - len(shown)} private jobs"
    if not shown:
        return in_words([private, *more])
    return f"{'job' if len([*shown, *more]) == 1 else 'jobs'} {in_words([*shown, *more, private])}"
