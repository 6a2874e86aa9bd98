"""The box to try a model: which requests it can make, what a refusal says, and how a stream is read."""

from __future__ import annotations

import pytest

from tests.rig.javascript import answer_of
from ugro.core.errors import UsageError
from ugro.web.views.trying import KINDS, Wish, problem_of, request_of


def test_each_kind_has_its_path_and_its_body() -> None:
    chat = Wish("chat", "m", messages=[{"role": "user", "content": "hi"}], max_tokens=7, temperature=0.0)
    path, body = request_of(chat)
    assert path == "/v1/chat/completions"
    assert (body["model"], body["messages"], body["max_tokens"], body["temperature"]) == ("m", chat.messages, 7, 0.0)
    assert body["stream"] is True
    assert request_of(Wish("complete", "m", "Once"))[1]["prompt"] == "Once"
    assert request_of(Wish("classify", "m", "a\n\nb\n")) == ("/classify", {"texts": ["a", "b"]})
    assert request_of(Wish("classify", "m", image="data:x")) == ("/classify", {"images": ["data:x"]})
    assert request_of(Wish("embed", "m", "a")) == ("/v1/embeddings", {"model": "m", "input": ["a"]})
    assert request_of(Wish("predict", "m", "[1, 2]")) == ("/predict", {"inputs": [1, 2]})
    assert request_of(Wish("predict", "m", '{"a": 1}')) == ("/predict", {"inputs": [{"a": 1}]})


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="there is no"):
        request_of(Wish(kind, "m", "  "))


def test_an_input_that_is_no_json_is_refused() -> None:
    for text in ("[1,", "[" * 90_000):
        with pytest.raises(UsageError, match="not JSON"):
            request_of(Wish("predict", "m", text))
    with pytest.raises(UsageError, match="longer than 100000 letters"):
        request_of(Wish("predict", "m", f"[{'1, ' * 40_000}1]"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"error": {"message": "no such model"}}', "the service answered 404: no such model"),
        ('{"error": "plain"}', "the service answered 404: plain"),
        ("<html>\x1b[31mNot found", "the service answered 404: <html> [31mNot found"),
        ("", "the service answered 404"),
        ("[]", "the service answered 404: []"),
    ],
)
def test_a_refusal_says_what_the_service_said(text: str, expected: str) -> None:
    assert problem_of(404, text) == expected


EVENTS = """
import { events } from "/static/services/events.js";
const text = [
  'data: {"a": "é€"}\\r\\n\\r\\n: note\\nevent: x\\n',
  'data:{"b": 1}\\n\\ndata: [DONE]\\n\\ndata: {"c": 1}\\n\\n',
];
const bytes = new TextEncoder().encode(text.join(""));
async function read(size) {
  async function* cut() {
    for (let at = 0; at < bytes.length; at += size) yield bytes.slice(at, at + size);
  }
  const found = [];
  for await (const one of events(cut())) found.push(one);
  return found;
}
async function odd() {
  try {
    for await (const one of events([new TextEncoder().encode("data: <html>\\n")])) void one;
  } catch (error) {
    return error.message;
  }
}
Promise.all([read(1), read(3), read(1000), odd()]).then(answer);
"""


def test_a_stream_may_be_cut_anywhere() -> None:
    *read, odd = answer_of(EVENTS)
    assert read == [[{"a": "é€"}, {"b": 1}]] * 3
    assert "not what a model's stream looks like" in odd
