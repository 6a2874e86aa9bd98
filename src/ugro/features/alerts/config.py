"""The map ``channels`` of the cluster file: where alerts and notifications about jobs can be sent."""

from __future__ import annotations

from typing import Any

from ugro.kernel.config.kinds import BadValueError, Choice, Duration, ListOf, MapOf, Number, Text, Whole, shown
from ugro.kernel.config.section import CHANNEL_NAME, LABEL, LINE, LOCAL_PATH, Nested, Section, is_line, key, section

LOG = "log"  # always there, without an entry
_MOST_CHANNELS = 100


def _is_url(text: str) -> bool:
    return is_line(text) and text.startswith(("http://", "https://")) and " " not in text


def _is_address(text: str) -> bool:
    return is_line(text) and text.count("@") == 1 and not set(" ,;<>") & set(text) and text[0] not in "@-"


URL = Text("an address that starts with http:// or https://", _is_url)
_ADDRESS = Text("a mail address such as ann@example.org", _is_address)


@section
class Channel(Section):
    """One way to notify somebody. Secrets are kept in files, which are read when they are needed."""

    noun = "a channel"

    type: str = key(
        "webhook",
        Choice(("webhook", "slack", "ntfy", "email")),
        "The receiver: any program that takes JSON (webhook), Slack, ntfy, or a mail server.",
    )
    url: str | None = key(
        None,
        URL,
        "The address to post to. If the address is a secret, use `url_file`.",
        example="https://ntfy.sh/ugro",
    )
    url_file: str | None = key(
        None, LOCAL_PATH, "A file with the address to post to.", example="~/.ugro/slack_url"
    )
    token_file: str | None = key(
        None, LOCAL_PATH, "A file with a token, sent as `Authorization: Bearer`.", example="~/.ugro/token"
    )
    host: str | None = key(None, LINE, "The mail server.", example="smtp.example.org")
    port: int | None = key(
        None, Whole(1, 65535), "The mail server's port; without it, the usual one for `tls`.", example=587
    )
    tls: str = key(
        "starttls", Choice(("starttls", "tls", "none")), "How the connection to the mail server is encrypted."
    )
    user: str | None = key(None, LINE, "The user name at the mail server.", example="ann")
    password_file: str | None = key(
        None, LOCAL_PATH, "A file with the password at the mail server.", example="~/.ugro/mail_password"
    )
    sender: str | None = key(
        None, _ADDRESS, "The sender of the mail; without it, the first address in `to`.", example="ugro@example.org"
    )
    to: tuple[str, ...] = key(
        (), ListOf("a list of mail addresses", _ADDRESS), "The receivers of the mail.", example=["ann@example.org"]
    )

    def check(self) -> None:
        if self.type == "email":
            if self.host is None or not self.to:
                raise BadValueError("a mail needs a server and a receiver", hint="give host and to")
        elif (self.url is None) == (self.url_file is None):
            raise BadValueError("it needs an address to post to", hint="give url, or url_file if it is a secret")


class _Channels(MapOf):
    def parse(self, value: object) -> dict[str, Channel]:
        found = super().parse(value)
        if LOG in found:
            raise BadValueError(f"{LOG} is the agent's log, and always there", hint="choose another name", at=(LOG,))
        return found


CHANNELS = _Channels("a map of names to channels", CHANNEL_NAME, Nested(Channel), most=_MOST_CHANNELS)


@section
class AlertSection(Section):
    """Which alerts about nodes are sent, and where. The agent's log and `ugro events` have all of them."""

    channels: tuple[str, ...] = key(
        (),
        ListOf("a list of names of channels such as [ops]", LABEL),
        "The channels that alerts are sent to.",
        example=("log",),
    )
    least: str = key(
        "info",
        Choice(("info", "warning", "critical")),
        "The least severity that is sent. A recovery is sent if its alert was.",
    )
    repeat: float = key(3600.0, Duration(), "How often an alert that lasts is sent again, at most, in seconds.")
    score_warning: float = key(70.0, Number(), "A health score below this is a warning.")
    score_critical: float = key(50.0, Number(), "A health score below this is critical.")
    gpu_temperature_warning: float = key(80.0, Number(), "A GPU above this, in °C, is a warning.")
    gpu_temperature_critical: float = key(85.0, Number(), "A GPU above this, in °C, is critical.")
    memory_warning: float = key(0.90, Number(), "A larger share of used memory is a warning.")
    memory_critical: float = key(0.95, Number(), "A larger share of used memory is critical.")
    unhealthy_nodes: float = key(
        0.5, Number(), "A larger share of nodes that are unhealthy or unreachable is critical."
    )

    def check_within(self, whole: Any) -> None:
        known = {LOG, *whole.channels}
        for index, name in enumerate(self.channels):
            if name not in known:
                text = f"there is no channel {shown(name)}"
                raise BadValueError(text, hint="add it to channels", at=("channels", index))
