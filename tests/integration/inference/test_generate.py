"""A tiny Llama behind the server, asked by OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.inference.conftest import Serve
from tests.rig import models
from tests.rig.inference import InferenceServer
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.proof
HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
ENDLESS: dict[str, Any] = {"prompt": "the", "max_tokens": 900_000, "logit_bias": {"1": -100}}
PROMPTS = [
    "the",
    "a lazy dog while seven",
    "wizards box and judge my vow " * 3,
    "é",
    "quick " * 20,
    "fox",
    "over",
    "dog",
]


@pytest.fixture(scope="module")
def server(serve: Serve, llama: Path) -> InferenceServer:
    return serve(llama, "--name", "tiny", "--max-batch", "4", "--queue", "12")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose texts take hours."""
    return models.llama(tmp_path_factory.mktemp("endless"), max_position_embeddings=1_000_000)


@pytest.fixture(scope="module")
def client(server: InferenceServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: openai.OpenAI, prompt: str, tokens: int = 40, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, **options)


def test_models_are_listed_as_openai_does(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "ugro"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_stream_has_the_words_and_the_usage_of_the_whole_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "temperature": 0}
    answer = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == answer.choices[0].finish_reason
    assert chunks[-1].usage == answer.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5


def test_a_greedy_answer_does_not_depend_on_who_else_asks(client: openai.OpenAI) -> None:
    """Alone, then together in any order with others of other lengths, half of them drawn at random and streamed."""
    alone = {prompt: complete(client, prompt).choices[0].text for prompt in PROMPTS}

    def noise(number: int) -> None:
        options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 5 + 7 * number, "stream": True}
        list(client.completions.create(model="tiny", prompt="box " * (1 + 5 * number), **options))

    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(noise, number) for number in range(4)]
        together = {prompt: pool.submit(complete, client, prompt) for prompt in PROMPTS}
        assert {prompt: each.result().choices[0].text for prompt, each in together.items()} == alone
        for other in others:
            other.result()


def test_a_seed_gives_the_same_words_again_and_others_for_each_choice(client: openai.OpenAI) -> None:
    def ask(seed: int | None) -> list[str]:
        options: dict[str, Any] = {"messages": HELLO, "max_tokens": 20, "temperature": 1, "top_p": 0.9, "n": 3}
        answer = client.chat.completions.create(model="tiny", seed=seed, **options)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 60
        return [choice.message.content or "" for choice in answer.choices]

    first = ask(7)
    assert ask(7) == first
    assert len(set(first)) == 3
    assert ask(8) != first


def test_completions_take_texts_and_tokens_and_can_repeat_them(client: openai.OpenAI) -> None:
    prompts = ["the quick", "a lazy dog"]
    several = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, echo=True, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(prompts[at // 2]) for at, choice in enumerate(several.choices)] == [True] * 4
    tokens = models.tokenizer()("the quick")["input_ids"]
    by_tokens = client.completions.create(model="tiny", prompt=tokens, max_tokens=6, temperature=0)
    assert prompts[0] + by_tokens.choices[0].text == several.choices[0].text
    assert by_tokens.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="tokens are numbers"):
        client.completions.create(model="tiny", prompt=[99999], max_tokens=1)


def test_a_stop_text_ends_the_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    text = complete(client, "the", 40).choices[0].text
    stop = text[12:15]
    cut = text[: text.index(stop)]
    stopped = complete(client, "the", 40, stop=[stop])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (cut, "stop")
    pieces = [chunk.choices[0].text for chunk in complete(client, "the", 40, stop=stop, stream=True)]
    assert "".join(pieces) == cut


def test_penalties_and_bias_change_what_is_said(client: openai.OpenAI) -> None:
    """A bias of 30 decides alone; each repetition takes 2 of it away, until something else is likelier."""
    token = models.tokenizer()("fox")["input_ids"][0]
    bias = {str(token): 30}
    assert complete(client, "the", 30, logit_bias=bias).choices[0].text == "fox" * 30
    tired = complete(client, "the", 30, logit_bias=bias, frequency_penalty=2, presence_penalty=2).choices[0].text
    assert tired.startswith("foxfox")
    assert tired.count("fox") < 20


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({"model": "other"}, 404, "is not served here"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "fox " * 400}]}, 400, "context has 256 tokens"),
        ({"max_tokens": 1000}, 400, "1000 new ones"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 100}, 400, "n: "),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"logprobs": True}, 400, "logprobs: not supported"),
        ({"top_logprobs": 3}, 400, "top_logprobs: not supported"),
        ({"tools": []}, 400, "tools: not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"n": 13}, 400, "n: "),
    ],
)
def test_a_wrong_request_is_refused_in_openais_words(
    server: InferenceServer, changed: dict[str, Any], status: int, words: str
) -> None:
    found = server.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO, **changed})
    assert found[0] == status
    assert words in found[1]["error"]["message"]
    assert {"message", "type", "param", "code"} == set(found[1]["error"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_texts(serve: Serve, endless: Path, stream: bool) -> None:
    server = serve(endless)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": stream, "n": 3}), _JSON)
    wait_until(lambda: server.metric("running") == 3, 60, "three texts that are generated")
    connection.close()
    wait_until(lambda: server.metric("running") == 0, 60, "an idle server")
    assert server.metric("cancelled_total") == 1
    assert server.post("/generate", {"text": "the", "max_tokens": 2})[1]["tokens"] == 2


_JSON = {"Content-Type": "application/json"}


def test_a_full_queue_is_429_and_what_waits_is_answered(client: openai.OpenAI, server: InferenceServer) -> None:
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(complete, client, "the", 150, logit_bias={"1": -100}) for _ in range(24)]
        found = [each.exception() for each in asked]
    refused = [error for error in found if isinstance(error, openai.RateLimitError)]
    assert len(refused) == sum(error is not None for error in found)
    assert 0 < len(refused) <= 24 - 12
    assert all(int(error.response.headers["Retry-After"]) >= 1 for error in refused)
    assert server.metric("running") == server.metric("queue") == 0


def test_a_client_that_retries_gets_through(server: InferenceServer) -> None:
    patient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20, timeout=120)
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(complete, patient, "the", 30) for _ in range(20)]
        assert len({each.result().choices[0].text for each in asked}) == 1


def test_batches_are_counted_and_the_api_is_described(server: InferenceServer) -> None:
    text = server.get("/metrics")[1]
    assert 'ugro_inference_batch_size_bucket{le="4"}' in text
    assert server.metric("batch_size_sum") > server.metric("batch_size_count") > 0
    assert server.metric("ready") == 1
    assert "/v1/chat/completions" in server.get("/openapi.json")[1]["paths"]


def test_plain_generate_takes_the_likeliest_words(server: InferenceServer, client: openai.OpenAI) -> None:
    status, found = server.post("/generate", {"text": "the", "max_tokens": 9})
    assert (status, found["tokens"], found["finish_reason"]) == (200, 9, "length")
    assert found["text"] == complete(client, "the", 9).choices[0].text


def test_without_a_chat_template_a_plain_one_is_used_and_said(serve: Serve, tmp_path: Path) -> None:
    server = serve(models.llama(tmp_path / "plain", has_template=False))
    assert "no chat template" in server.get("/health")[1]["reason"]
    assert "no chat template" in server.log()
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    said = server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    again = server.post("/generate", {"text": "user: the quick brown fox\nassistant:", "max_tokens": 8})[1]["text"]
    assert said == again


def test_sigterm_finishes_a_stream(serve: Serve, llama: Path) -> None:
    server = serve(llama)
    body = {"prompt": "the", "max_tokens": 200, "stream": True, "logit_bias": {"1": -100}}
    with server.open("POST", "/v1/completions", json.dumps(body).encode(), _JSON) as (_, answer):
        assert answer.readline().startswith(b"data:")
        server.process.send_signal(signal.SIGTERM)
        rest = answer.read().decode()
    assert rest.endswith("data: [DONE]\n\n")
    assert '"finish_reason": "length"' in rest
    assert server.process.wait(60) == 0


def test_a_stream_is_cut_when_the_grace_is_over(serve: Serve, endless: Path) -> None:
    server = serve(endless, "--grace", "1")
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    with server.open("POST", "/v1/completions", body, _JSON) as (_, answer):
        assert answer.readline().startswith(b"data:")
        assert server.stop() == 0
