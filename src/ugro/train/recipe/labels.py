"""The classes of a classification: their names, and the number of each label in the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ugro.core.errors import UsageError


class Labels:
    """Names in a fixed order: as the dataset says, else sorted; numbers by value."""

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self.names = names
        self._number = {value: number for number, value in enumerate(values)}

    @classmethod
    def of(cls, seen: Iterable[Any], names: list[str] | None) -> Labels:
        if names is not None:
            return cls(list(names), list(range(len(names))))
        values = set()
        for value in seen:
            if not isinstance(value, str | int):
                raise UsageError(f"{value!r} is no label", hint="labels are texts or whole numbers")
            values.add(value)
        ordered = sorted(values, key=_order)
        if len(ordered) < 2:
            raise UsageError(f"{len(ordered)} class in the data; a classification needs two or more")
        return cls([str(value) for value in ordered], ordered)

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any) -> int:
        try:
            return self._number[value]
        except (KeyError, TypeError):
            known = f"known: {', '.join(self.names[:10])}"
            raise UsageError(f"label {value!r} is not among those of the training data", hint=known) from None

    def configuration(self) -> dict[str, Any]:
        """As transformers' configurations have them."""
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by value, also those of a CSV file, where everything is text; then texts."""
    text = str(value)
    is_number = text.removeprefix("-").isdecimal()
    return not is_number, float(text) if is_number else 0.0, text
