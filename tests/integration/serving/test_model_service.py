"""A model of transformers, served by UGRO's own server on three nodes, and OpenAI's own client."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import needs
from tests.rig.service import ServicePlace
from ugro.features.services.client import ServiceWish
from ugro.features.services.model import ServiceReport

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
from tests.rig import models  # noqa: E402  # it imports transformers

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    needs.programs("haproxy"),
]


@pytest.fixture
def place() -> Iterator[ServicePlace]:
    with ServicePlace((0.0, 0.0)) as made:
        yield made


def started(place: ServicePlace, model: Path) -> ServiceReport:
    wish = ServiceWish(str(model), {"name": "echo"}, {"port": place.port, "replicas": "all"})
    place.ask(lambda client: client.services.start(wish, env={}, key="one"))
    return place.ask(lambda client: client.services.wait("echo", timeout_s=200))


def test_the_official_client_talks_to_a_model_on_all_nodes(place: ServicePlace) -> None:
    found = started(place, models.llama(place.folder / "tiny"))
    assert sorted(str(one.node) for one in found.replicas) == ["n1", "n2"]
    client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none")
    assert [one.id for one in client.models.list()] == ["echo"]
    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="echo", messages=messages, max_tokens=6, temperature=0)
    assert whole.usage.completion_tokens == 6
    stream = client.chat.completions.create(
        model="echo", messages=messages, max_tokens=6, temperature=0, stream=True
    )
    pieces = [event.choices[0].delta.content or "" for event in stream if event.choices]
    assert "".join(pieces) == whole.choices[0].message.content

    # Around the door: the replica wants the service's own secret, which no report shows.
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{found.replicas[0].address}/v1/models", timeout=20)
    place.ask(lambda client: client.services.stop("echo"))
    place.ask(lambda client: client.services.wait_stopped("echo"))


def test_an_adapter_travels_with_its_base(place: ServicePlace) -> None:
    base = models.llama(place.folder / "base")
    adapter = models.adapter(place.folder / "adapter", base)
    models.describe(adapter, format=1, task="causal-lm", kind="lora", base="base", base_path=str(base), labels=None)
    found = started(place, adapter)
    client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none")
    answer = client.completions.create(model="echo", prompt="hello", max_tokens=4, temperature=0)
    assert answer.usage.completion_tokens == 4
