"""A part of a configuration file: a map of keys, each with its kind, its default and what it means."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from ugro.config.kinds import BadValueError, Kind
from ugro.config.yamltext import shown


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_a_map(cls, value: object) -> object:
        # "ssh:" with every key below it commented out is null to YAML and "the defaults" to its writer.
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadValueError(f"expected a map of keys to values, got {shown(value)}")
        return value

    @classmethod
    def kind_of(cls, key: str) -> Kind | None:
        """None for a section."""
        found = [part for part in cls.model_fields[key].metadata if isinstance(part, Kind)]
        return found[0] if found else None

    @classmethod
    def example_of(cls, key: str) -> object:
        field = cls.model_fields[key]
        value: object = field.examples[0] if field.examples else field.get_default(call_default_factory=True)
        if not isinstance(value, Section):
            return value
        first = next(iter(type(value).model_fields))
        return {first: value.example_of(first)}
