"""Other models behind the server: classification of texts and images, embeddings, LoRA adapters."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.inference.conftest import Serve
from tests.rig import models
from tests.rig.inference import InferenceServer, refusal

# peft asks transformers for something by an old name.
pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]
TEXTS = ["the quick brown fox", "a", "seven wizards judge my vow over a lazy dog while the fox jumps", "é ü"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def embedder(serve: Serve, bert: Path) -> InferenceServer:
    return serve(bert, "--task", "embed", "--name", "vectors", "--batch-wait-ms", "20")


def test_texts_are_classified_as_transformers_does_it(serve: Serve, bert: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    server = serve(bert, "--batch-wait-ms", "20")
    model, words = AutoModelForSequenceClassification.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    with torch.inference_mode():
        wanted = [model(**words(text, return_tensors="pt")).logits[0].softmax(-1).tolist() for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: server.post("/classify", {"texts": [text]})[1]["results"][0], TEXTS))
    for one, chances in zip(found, wanted, strict=True):
        assert one["score"] == pytest.approx(max(chances), abs=1e-5)
        assert one["label"] == ("bad", "good", "so-so")[chances.index(max(chances))]
        assert sum(each["score"] for each in one["scores"]) == pytest.approx(1, abs=1e-5)
    assert server.metric("batch_size_sum") > server.metric("batch_size_count")
    assert len(server.post("/classify", {"texts": TEXTS, "top": 1})[1]["results"][2]["scores"]) == 1
    assert server.post("/classify", {"images": ["x"]})[0] == 400
    assert server.post("/classify", {"texts": []})[0] == 400
    assert server.post("/classify", {"texts": ["long " * 5000]})[0] == 200
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[0] == 404


def test_embeddings_by_openais_client_are_means_of_length_one(embedder: InferenceServer, bert: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0)
    model, words = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    answer = client.embeddings.create(model="vectors", input=TEXTS)  # asks for base64 by itself
    tokens = 0
    for text, one in zip(TEXTS, answer.data, strict=True):
        inputs = words(text, return_tensors="pt")
        tokens += inputs["input_ids"].shape[1]
        with torch.inference_mode():
            mean = model(**inputs).last_hidden_state[0].mean(0)
        assert one.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
    assert answer.usage.prompt_tokens == tokens
    plain = client.embeddings.create(model="vectors", input=TEXTS[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)
    few = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=8).data[0].embedding
    assert len(few) == 8
    assert math.hypot(*few) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"input": []}, "between 1 and 2048"),
        ({"input": [""]}, "a text is empty"),
        ({"input": [5]}, "input"),
        ({"dimensions": 5000}, "32 dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"model": "other"}, "is not served here"),
    ],
)
def test_a_wrong_embedding_request_is_refused(embedder: InferenceServer, changed: dict[str, Any], words: str) -> None:
    status, found = embedder.post("/v1/embeddings", {"model": "vectors", "input": "x", **changed})
    assert status in (400, 404)
    assert words in found["error"]["message"]


def test_plain_embed_gives_the_same_vectors(embedder: InferenceServer) -> None:
    plain = embedder.post("/embed", {"texts": TEXTS})[1]["vectors"]
    same = embedder.post("/v1/embeddings", {"input": TEXTS})[1]["data"]
    for one, other in zip(plain, same, strict=True):
        assert one == pytest.approx(other["embedding"], abs=1e-6)


def test_a_causal_model_embeds_when_asked_to(serve: Serve, llama: Path) -> None:
    server = serve(llama, "--task", "embed")
    alone = [server.post("/embed", {"texts": [text]})[1]["vectors"][0] for text in TEXTS]
    for one, other in zip(alone, server.post("/embed", {"texts": TEXTS})[1]["vectors"], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_an_adapter_is_served_on_its_base(serve: Serve, llama: Path, tmp_path: Path) -> None:
    """By the base that it names, or by the one that a job brings; and it says something else than its base."""
    adapter = models.adapter(tmp_path / "lora", llama)
    base, by_name = serve(llama), serve(adapter)
    moved = tmp_path / "elsewhere"
    shutil.copytree(adapter, moved)
    models.describe(moved, task="causal-lm", kind="lora", base="tiny-llama", base_path="/nowhere")
    by_folder = serve(moved, UGRO_FOLDER_BASE=str(llama))
    asked = {"text": "the quick", "max_tokens": 20}
    texts = [server.post("/generate", asked)[1]["text"] for server in (base, by_name, by_folder)]
    assert texts[1] == texts[2] != texts[0]
    assert texts[1] == _peft(adapter, llama)


def _peft(adapter: Path, base: Path) -> str:
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(adapter)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    with torch.inference_mode():
        tokens = words("the quick", return_tensors="pt")
        made = model.generate(**tokens, max_new_tokens=20, do_sample=False)
    return str(words.decode(made[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))


def test_an_adapter_without_its_base_is_one_clear_error(llama: Path, tmp_path: Path) -> None:
    adapter = models.adapter(tmp_path / "lora", llama)
    models.describe(adapter, task="causal-lm", kind="lora", base="tiny-llama", base_path=None)
    (adapter / "adapter_config.json").write_text(
        (adapter / "adapter_config.json").read_text(encoding="utf-8").replace(str(llama), "nobody/nothing"),
        encoding="utf-8",
    )
    code, text = refusal("--model", str(adapter), cwd=tmp_path)
    assert code == 64
    assert "the base model of the LoRA adapter: nobody/nothing is neither a folder nor" in text
    assert "--base FOLDER" in text


def test_weights_that_are_broken_or_lack_something_are_refused(llama: Path, tmp_path: Path) -> None:
    """transformers would make up at random what is missing."""
    code, text = refusal("--model", str(llama), "--task", "classify", cwd=tmp_path)
    assert (code, "its weights lack score.weight" in text) == (64, True)
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    (broken / "model.safetensors").write_bytes(b"no safetensors at all")
    code, text = refusal("--model", str(broken), cwd=tmp_path)
    assert (code, "cannot be loaded" in text) == (64, True)
    assert "Traceback" not in text


def test_the_reason_why_a_model_is_broken_names_the_tensor(llama: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    broken, name = tmp_path / "broken", "model.layers.0.mlp.up_proj.weight"
    shutil.copytree(llama, broken)
    weights = load_file(llama / "model.safetensors")

    def said() -> str:
        code, text = refusal("--model", str(broken), cwd=tmp_path)
        assert (code, "Traceback" in text, text.count("error: ")) == (64, False, 1), text
        return text

    rows, columns = weights[name].shape
    save_file({**weights, name: torch.zeros(3, columns)}, broken / "model.safetensors", {"format": "pt"})
    assert f"the tensor {name} is 3 x {columns} in its weights, and {rows} x {columns} by its config.json" in said()
    save_file({key: one for key, one in weights.items() if key != name}, broken / "model.safetensors", {"format": "pt"})
    assert f"its weights lack {name}" in said()
    whole = (llama / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-10])
    assert f"model.safetensors is cut off in the tensor {_last_tensor(whole)}" in said()


def _last_tensor(file: bytes) -> str:
    header: dict[str, Any] = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    tensors = {name: one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"}
    return max(tensors, key=lambda name: tensors[name])


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")
def test_images_are_classified_from_base64(serve: Serve, tmp_path: Path) -> None:
    from PIL import Image

    server = serve(models.resnet(tmp_path / "resnet"))

    def picture(colour: tuple[int, int, int], kind: str) -> str:
        content = io.BytesIO()
        Image.new("RGB", (50, 40), colour).save(content, kind)
        return base64.b64encode(content.getvalue()).decode()

    red, blue = picture((255, 0, 0), "PNG"), picture((0, 0, 255), "JPEG")
    status, found = server.post("/classify", {"images": [red, f"data:image/jpeg;base64,{blue}"]})
    assert status == 200
    assert {one["label"] for one in found["results"]} <= {"cat", "dog"}
    again = server.post("/classify", {"images": [red]})[1]["results"][0]
    assert again["score"] == pytest.approx(found["results"][0]["score"], abs=1e-5)
    for bad in ("no base64 §", base64.b64encode(b"no image").decode(), ""):
        assert server.post("/classify", {"images": [red, bad]})[1]["error"]["param"] == "images[1]"
    assert server.post("/classify", {"texts": ["x"]})[0] == 400
