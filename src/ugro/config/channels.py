"""The channels by which people are told of things: one entry each in the map ``channels`` of the cluster file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from ugro.config.kinds import BadValueError, Choice, Kind, ListOf, OrNull, Text, Whole, is_line, is_local_path
from ugro.config.section import Section
from ugro.config.yamltext import flow, shown

LOG = "log"  # is always there, and needs no entry
_TYPES = ("webhook", "slack", "ntfy", "email")
_MOST_CHANNELS = 100


def _is_url(text: str) -> bool:
    return is_line(text) and text.startswith(("http://", "https://")) and " " not in text


def _is_address(text: str) -> bool:
    return is_line(text) and text.count("@") == 1 and not set(" ,;<>") & set(text) and text[0] not in "@-"


def is_channel_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.replace("-", "").replace("_", "").isalnum() and text[0] != "-"


_FILE = Text("a path that starts with / or ~", is_local_path, expands_home=True)
_ADDRESS = Text("a mail address such as ann@example.org", _is_address)
_LINE = Text("a text on one line", is_line)


class Channel(Section):
    """One way to tell somebody something. Secrets stand in files, which are read when they are needed."""

    type: Annotated[str, Choice(_TYPES)] = Field(
        "webhook", description="What is at the other end: any program (JSON), Slack, ntfy, or a mail server."
    )
    url: Annotated[str | None, OrNull(Text("an address that starts with http:// or https://", _is_url))] = Field(
        None, description="Where to post to. One that is a secret belongs into a file.", examples=["https://ntfy.sh/ugro"]
    )
    url_file: Annotated[str | None, OrNull(_FILE)] = Field(
        None, description="A file with the address to post to.", examples=["~/.ugro/slack_url"]
    )
    token_file: Annotated[str | None, OrNull(_FILE)] = Field(
        None, description="A file with a token, sent as `Authorization: Bearer`.", examples=["~/.ugro/token"]
    )
    host: Annotated[str | None, OrNull(_LINE)] = Field(
        None, description="The mail server.", examples=["smtp.example.org"]
    )
    port: Annotated[int | None, OrNull(Whole(1, 65535))] = Field(
        None, description="Its port; without it, what is usual for `tls`.", examples=[587]
    )
    tls: Annotated[str, Choice(("starttls", "tls", "none"))] = Field(
        "starttls", description="How the connection to the mail server is kept private."
    )
    user: Annotated[str | None, OrNull(_LINE)] = Field(
        None, description="The user name at the mail server.", examples=["ann"]
    )
    password_file: Annotated[str | None, OrNull(_FILE)] = Field(
        None, description="A file with the password at the mail server.", examples=["~/.ugro/mail_password"]
    )
    sender: Annotated[str | None, OrNull(_ADDRESS)] = Field(
        None, description="Who the mail is from; without it, the first of `to`.", examples=["ugro@example.org"]
    )
    to: Annotated[tuple[str, ...], ListOf("a list of mail addresses", _ADDRESS)] = Field(
        (), description="Who gets the mail.", examples=[["ann@example.org"]]
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.type == "email":
            if self.host is None or not self.to:
                raise BadValueError("a mail needs a host and somebody to go to", hint="give host and to")
        elif (self.url is None) == (self.url_file is None):
            raise BadValueError("it needs an address to post to", hint="give url, or url_file if it is a secret")
        return self


@dataclass(frozen=True, slots=True)
class Channels(Kind):
    """A map of names to channels."""

    @property
    def expected(self) -> str:
        return "a map of names to channels"

    def from_text(self, text: str) -> object:
        try:
            return json.loads(text)
        except ValueError:
            return text

    def parse(self, value: object) -> dict[str, Channel]:
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > _MOST_CHANNELS:
            raise self.refuse(value, hint="for example: channels: {ops: {type: slack, url_file: ~/.ugro/slack_url}}")
        return {self._name(name): self._channel(name, fields) for name, fields in value.items()}

    def _name(self, name: object) -> str:
        if not isinstance(name, str) or not is_channel_name(name):
            raise BadValueError(f"expected names of letters, digits, - and _, got {shown(name)}")
        if name == LOG:
            raise BadValueError(f"{LOG} is the agent's log, and always there", hint="choose another name", at=(name,))
        return name

    def _channel(self, name: str, fields: object) -> Channel:
        if isinstance(fields, Channel):
            return fields
        try:
            return Channel.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            place = tuple(part for part in first["loc"] if isinstance(part, str | int))
            if isinstance(cause, BadValueError):
                at = (name, *place, *cause.at)
                raise BadValueError(cause.message, hint=cause.hint or _example(place), at=at) from None
            known = ", ".join(Channel.model_fields)
            raise BadValueError("unknown key", hint=f"the keys of a channel are {known}", at=(name, *place)) from None


def _example(place: tuple[str | int, ...]) -> str | None:
    key = place[0] if place else None
    is_known = isinstance(key, str) and key in Channel.model_fields
    return f"for example: {key}: {flow(Channel.example_of(str(key)))}" if is_known else None
