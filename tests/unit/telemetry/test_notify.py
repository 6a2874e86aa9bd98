"""Channels, on real servers of this machine: what arrives, what is tried again, and what never leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.rig.receivers import HttpReceiver, MailReceiver, http_receiver, mail_receiver
from ugro.features.alerts.channels import Message, Notifier, Patience, SendFailure
from ugro.features.alerts.config import AlertSection, Channel
from ugro.kernel.config.load import parse_config
from ugro.kernel.support.errors import ConfigError

HOT = Message(
    "GPU 0 of gpu1 is at 91 °C <b>",
    "critical",
    "alert",
    1_700_000_000.5,
    "lab",
    "see: ugro health gpu1",
    "started",
    "gpu1",
    rule="gpu0-temperature",
)
QUICK = Patience(tries=4, base_s=0.01, cap_s=0.02)
SECRET = "s3cret-words"


@pytest.fixture
def web() -> Iterator[HttpReceiver]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def mail() -> Iterator[MailReceiver]:
    with mail_receiver() as receiver:
        yield receiver


def channel(**fields: object) -> Channel:
    return Channel.read(fields)


def with_notifier(channels: dict[str, Channel], work: Callable[[Notifier], Awaitable[None]]) -> Notifier:
    made: list[Notifier] = []

    async def run() -> None:
        notifier = Notifier(lambda: channels, QUICK)
        made.append(notifier)
        await work(notifier)
        await notifier.close()

    asyncio.run(run())
    return made[0]


def tell(channels: dict[str, Channel], message: Message = HOT) -> Notifier:
    async def work(notifier: Notifier) -> None:
        notifier.tell(channels, message)

    return with_notifier(channels, work)


def test_a_webhook_gets_json_with_every_field(web: HttpReceiver) -> None:
    tell({"hook": channel(type="webhook", url=f"{web.url}/ugro")})
    [posted] = web.posted
    assert (posted.path, posted.headers["Content-Type"]) == ("/ugro", "application/json")
    assert json.loads(posted.body) == {
        "kind": "alert",
        "state": "started",
        "severity": "critical",
        "title": "GPU 0 of gpu1 is at 91 °C <b>",
        "detail": "see: ugro health gpu1",
        "time": "2023-11-14T22:13:20.500+00:00",
        "cluster": "lab",
        "node": "gpu1",
        "job": None,
        "attempt": None,
        "rule": "gpu0-temperature",
    }


def test_slack_gets_text_in_which_nothing_is_markup(web: HttpReceiver, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{web.url}/services/{SECRET}\n")
    tell({"ops": channel(type="slack", url_file=str(tmp_path / "url"))})
    [posted] = web.posted
    assert posted.path == f"/services/{SECRET}"
    text = json.loads(posted.body)["text"]
    assert "CRITICAL: GPU 0 of gpu1 is at 91 °C &lt;b&gt;" in text


def test_ntfy_gets_the_text_with_a_title_a_priority_and_the_token(web: HttpReceiver, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    tell({"phone": channel(type="ntfy", url=f"{web.url}/topic", token_file=str(tmp_path / "token"))})
    [posted] = web.posted
    assert posted.headers["Title"] == "[ugro lab] CRITICAL: GPU 0 of gpu1 is at 91 ?C <b>"
    assert (posted.headers["Priority"], posted.headers["Authorization"]) == ("urgent", f"Bearer {SECRET}")
    assert "91 °C" in posted.body.decode()


def test_a_mail_goes_to_everybody_with_a_login_from_a_file(mail: MailReceiver, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET + "\n")
    server: dict[str, object] = {"host": "127.0.0.1", "port": mail.port, "tls": "none", "user": "ann"}
    people = {"sender": "ugro@example.org", "to": ["a@example.org", "b@example.org"]}
    tell({"mail": channel(type="email", **server, **people, password_file=str(tmp_path / "password"))})
    [found] = mail.mails
    assert mail.logins == [("ann", SECRET)]
    assert (found["To"], found["From"]) == ("a@example.org, b@example.org", "ugro@example.org")
    assert found["Subject"] == "[ugro lab] CRITICAL: GPU 0 of gpu1 is at 91 °C <b>"
    assert "see: ugro health gpu1" in found.get_content()


def test_a_name_with_a_line_break_makes_no_second_header(mail: MailReceiver, web: HttpReceiver) -> None:
    evil = Message("job\r\nBcc: eve@example.org", "info", "job", 0, "lab")
    tell(
        {
            "mail": channel(type="email", host="127.0.0.1", port=mail.port, tls="none", to=["a@example.org"]),
            "phone": channel(type="ntfy", url=web.url),
        },
        evil,
    )
    assert mail.mails[0]["Bcc"] is None
    assert "Bcc" not in web.posted[0].headers


def test_what_fails_for_now_is_tried_again_and_arrives_once(web: HttpReceiver, mail: MailReceiver) -> None:
    web.answers = [503, 429]
    mail.refusals = [b"451 later"]
    channels = {
        "hook": channel(url=web.url),
        "mail": channel(type="email", host="127.0.0.1", port=mail.port, tls="none", to=["a@example.org"]),
    }
    notifier = tell(channels)
    assert (len(web.posted), len(mail.mails)) == (3, 1)
    assert notifier.outcomes == {("hook", "sent"): 1, ("mail", "sent"): 1}


def test_what_is_refused_for_good_is_tried_once_and_what_stays_away_not_for_ever(
    web: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    web.answers = [403]
    notifier = tell({"hook": channel(url=f"{web.url}/{SECRET}"), "dead": channel(url=f"http://127.0.0.1:1/{SECRET}")})
    assert len(web.posted) == 1
    assert notifier.outcomes == {("hook", "failed"): 1, ("dead", "failed"): 1}
    assert "channel hook: answered 403; given up" in caplog.text
    assert "channel dead: connection refused; given up" in caplog.text
    assert SECRET not in caplog.text


def test_a_redirect_is_not_followed_with_our_token(web: HttpReceiver, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    web.answers = [302]
    notifier = tell({"hook": channel(url=web.url, token_file=str(tmp_path / "token"))})
    assert [posted.path for posted in web.posted] == ["/"]
    assert notifier.outcomes == {("hook", "failed"): 1}


def test_a_channel_that_hangs_holds_back_no_other_and_its_queue_is_bounded(
    web: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    with http_receiver() as slow:
        slow.before_answer = lambda: go_on.wait(20)
        channels = {"slow": channel(url=slow.url), "quick": channel(url=web.url)}

        async def work(notifier: Notifier) -> None:
            for _ in range(300):
                notifier.tell(["slow"], HOT)
            notifier.tell(["quick"], HOT)
            async with asyncio.timeout(20):
                while not web.posted:  # noqa: ASYNC110  # a server of another thread tells nobody
                    await asyncio.sleep(0.01)
            assert notifier.outcomes["slow", "dropped"] >= 99
            go_on.set()

        with_notifier(channels, work)
    assert "too much waits for it" in caplog.text


def test_a_test_message_says_what_is_wrong(web: HttpReceiver, tmp_path: Path) -> None:
    async def work(notifier: Notifier) -> None:
        with pytest.raises(SendFailure, match="there is no channel nobody"):
            await notifier.test("nobody", HOT)
        with pytest.raises(SendFailure, match=r"channel ops: .*/none cannot be read: No such file"):
            await notifier.test("ops", HOT)
        with pytest.raises(SendFailure, match="holds no http address"):
            await notifier.test("odd", HOT)

    (tmp_path / "odd").write_text("file:///etc/passwd")
    with_notifier(
        {
            "ops": channel(type="slack", url_file=str(tmp_path / "none")),
            "odd": channel(type="slack", url_file=str(tmp_path / "odd")),
        },
        work,
    )


def test_the_log_is_a_channel_too(caplog: pytest.LogCaptureFixture) -> None:
    async def work(notifier: Notifier) -> None:
        notifier.tell(["log"], HOT)

    caplog.set_level(logging.INFO)
    with_notifier({}, work)
    [record] = [one for one in caplog.records if "91 °C" in one.getMessage()]
    assert (record.levelno, record.__dict__["node"]) == (logging.ERROR, "gpu1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("channels: [a]", "channels: expected a map of names to channels, got a list"),
        ("channels: {a: {type: pager}}", "channels.a.type: expected webhook, slack, ntfy or email"),
        ("channels: {a: {}}", "channels.a: it needs an address to post to"),
        ("channels: {a: {url: 'ftp://x'}}", "channels.a.url: expected an address that starts with http"),
        ("channels: {a: {type: email}}", "channels.a: a mail needs a server"),
        ("channels: {a: {url: 'http://x', colour: red}}", "channels.a.colour: unknown key"),
        ("channels: {log: {url: 'http://x'}}", "channels.log: log is the agent's log"),
        ("channels: {a b: {url: 'http://x'}}", "expected a channel's name: letters"),
        ("alerts: {channels: [ops]}", 'alerts.channels: there is no channel "ops"'),
    ],
)
def test_a_wrong_channel_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f"nodes: [a]\n{text}\n", Path("c.yaml"), {})
    assert str(error.value).startswith("c.yaml:2: ")
    assert message in str(error.value)


def test_a_channel_that_only_a_variable_names_must_be_there_as_well() -> None:
    for more, place in (({}, "channels in the cluster file"), ({"UGRO_CHANNELS": "{}"}, "UGRO_CHANNELS")):
        with pytest.raises(ConfigError) as error:
            parse_config("nodes: [a]\n", Path("c.yaml"), {"UGRO_ALERTS_CHANNELS": "ops", **more})
        assert error.value.message == 'UGRO_ALERTS_CHANNELS: there is no channel "ops"'
        assert error.value.hint == f"add it to {place}"
    given = {"UGRO_ALERTS_CHANNELS": "ops", "UGRO_CHANNELS": '{"ops": {"url": "http://127.0.0.1:1/"}}'}
    assert parse_config("nodes: [a]\n", Path("c.yaml"), given).section(AlertSection).channels == ("ops",)


@pytest.mark.parametrize("chosen", [{}, {"UGRO_ALERTS_CHANNELS": " "}], ids=["not set", "empty"])
def test_a_variable_that_takes_away_a_channel_of_the_file_is_the_one_that_is_named(chosen: dict[str, str]) -> None:
    text = "nodes: [a]\nchannels: {ops: {url: 'http://127.0.0.1:1/'}}\nalerts: {channels: [ops]}\n"
    other = '{"phone": {"url": "http://127.0.0.1:1/"}}'
    with pytest.raises(ConfigError) as error:
        parse_config(text, Path("c.yaml"), {"UGRO_CHANNELS": other, **chosen})
    assert error.value.message == (
        'UGRO_CHANNELS: there is no channel "ops", which alerts.channels in the cluster file names'
    )
    assert error.value.hint == "add it to UGRO_CHANNELS, or choose other channels with UGRO_ALERTS_CHANNELS"
    both = {"UGRO_CHANNELS": other, "UGRO_ALERTS_CHANNELS": "phone"}
    assert parse_config(text, Path("c.yaml"), both).section(AlertSection).channels == ("phone",)
