"""Text that grows token by token: whole characters only, and never a part of a stop text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # tokens of the prompt that are decoded, too: some tokenizers drop the space before the first one
_UNFINISHED = "\ufffd"  # a character of which some bytes are still to come
_MOST_PENDING = 8  # tokens without a whole character: only the last one is not known then
_CHARACTER = 4  # the most tokens of a character

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    def __init__(self, decode: Decode, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens = list(prompt[-CONTEXT:])
        self._shown = len(self._tokens)  # tokens whose text was returned
        self._start = 0  # where decoding begins: a bit before, so that spaces come out right
        self._before = decode(self._tokens) if self._tokens else ""
        self._held = ""  # may be the beginning of a stop text
        self.is_stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after this token."""
        self._tokens.append(token)
        return self._passed(self._new())

    def end(self) -> str:
        """What was held back; nothing more comes."""
        if self.is_stopped:
            return ""
        rest = self._decode(self._tokens[self._start :])[len(self._before) :]
        held, self._held = self._held + rest, ""
        return self._cut(held)

    def _new(self) -> str:
        text = self._decode(self._tokens[self._start :])
        known = text.removesuffix(_UNFINISHED)  # only the last character can still change
        is_pending = len(text) <= len(self._before) or known != text
        if is_pending and len(self._tokens) - self._shown < _MOST_PENDING:
            return ""
        new = known[len(self._before) :]
        start = self._shown if known == text else max(self._start, len(self._tokens) - _CHARACTER)
        self._start, self._shown = start, len(self._tokens)
        self._before = self._decode(self._tokens[start:])[: len(known) - len(text) or None]
        return new

    def _passed(self, new: str) -> str:
        text = self._cut(self._held + new)
        if self.is_stopped:
            return text
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _cut(self, text: str) -> str:
        """Up to the first stop text, if it has one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if not places:
            return text
        self.is_stopped = True
        return text[: min(places)]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
