"""``ugro launch --model`` as a user types it: a model of this machine travels, trains on every node, and comes back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ugro as package
from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from ugro.features.recipes.client import Wanted

TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "the sun is warm today", "we train a small model"] * 40


@pytest.fixture(scope="module")
def shared() -> Iterator[Ugro]:
    with commands() as ugro:
        yield ugro


def model_of(folder: Path, config: dict[str, object]) -> Path:
    """Looks like a model; nobody loads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 65536, "intermediate_size": 131072,
    "num_hidden_layers": 100, "num_attention_heads": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


def test_mistakes_are_one_error_each_and_nothing_is_submitted(shared: Ugro) -> None:
    here = shared.home / "cwd"
    model_of(here / "large", LARGE)
    (here / "empty").mkdir()
    (here / "text.txt").write_text("a text")
    for words, said in (
        ("--model lama-7b --dataset wikitext", "did you mean llama-7b?"),
        ("--model ./empty --dataset ./text.txt", "it has no config.json"),
        ("--model ./nowhere --dataset ./text.txt", "nowhere: no such file or directory"),
        ("--model ./large", "--dataset is missing"),
        ("--model ./large --dataset ./gone.txt", "gone.txt: no such file or directory"),
        (f"--model ./{'x' * 300} --dataset ./text.txt", "file name too long"),
        (f"--model ./large --dataset ./{'x' * 300}", "file name too long"),
        ("--model ./large train.py", "give a script or --model, not both: train.py"),
        ("--model ./large --dataset ./text.txt --recipe nothing", "there is no recipe 'nothing'"),
        ("--model ./large --dataset ./text.txt", "./large does not fit"),
    ):
        done = shared("launch", *words.split())
        assert done.returncode != 0, words
        assert said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert json.loads(shared("status", "--json").stdout)["jobs"] == []


@pytest.mark.proof
def test_a_model_in_the_cache_of_this_machine_goes_with_the_job(shared: Ugro, tmp_path: Path) -> None:
    """The node's cache is elsewhere: it lacks the model, and reaches no hub."""
    place = tmp_path / "hub" / "models--org--small"
    snapshot = place / "snapshots" / "abc"
    small = {**LARGE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model_of(place / "blobs", small)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (shared.home / "cwd" / "text.txt").write_text("a text")
    shared("node", "ls")  # the agent, and so its node, has none of the variables below
    words = ["launch", "--model", "org/small", "--dataset", "./text.txt", "--env", f"HF_HOME={tmp_path}/other"]
    found = shared(*words, "--dry-run", "--json", env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    assert found.returncode == 0, found.stderr
    spec = json.loads(found.stdout)["spec"]
    assert {one["name"]: one["files"] for one in spec["folders"]} == {"model": 2, "dataset": 1}
    assert spec["argv"][:5] == ["train.py", "--model", "org/small", "--dataset", "text.txt"]
    assert ["UGRO_MODEL_SOURCE", str(snapshot)] in spec["env"]
    shown = shared("launch", "--model", "org/other", "--dataset", "./text.txt")
    assert "hf download org/other" in shown.stderr, shown.stderr


@pytest.mark.parametrize("env", [{"TOKEN": "a=b"}, "TOKEN=a=b", ["TOKEN=a=b"]])
def test_a_client_gives_variables_as_for_every_job(shared: Ugro, tmp_path: Path, env: object) -> None:
    model = model_of(tmp_path / "small", {**LARGE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2})
    (tmp_path / "text.txt").write_text("a text")
    shared("node", "ls")
    wanted = Wanted(str(model), str(tmp_path / "text.txt"))
    with package.Client(home=shared.home) as client:
        found = client.recipes.prepare(wanted, fields={"env": env, "folder": {"more": str(tmp_path)}})
    assert found.fields["env"] == ["TOKEN=a=b", f"UGRO_MODEL_SOURCE={model}"]
    assert found.fields["folder"][0] == f"more={tmp_path}"


@pytest.mark.proof
def test_a_node_that_is_away_does_not_keep_the_others_from_a_model_that_they_have(ugro: Ugro, tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "hub" / "models--org--small" / "snapshots" / "abc"
    model_of(snapshot, {**LARGE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2})
    (ugro.home / "cwd" / "text.txt").write_text("a text")
    ugro.cluster = tmp_path / "cluster.yaml"
    has_it = f"{{transport: local, remote_root: {tmp_path}/n1, env: {{HF_HOME: {tmp_path}/cache}}}}"
    ugro.cluster.write_text(f"nodes:\n  n1: {has_it}\n  gone: {{transport: [sh, -c, 'exit 9', sh]}}\n")
    words = ["--recipe", "causal_lm", "--model", "org/small", "--dataset", "./text.txt"]
    found = ugro("launch", *words, "--dry-run", "--json", env={"HF_HOME": str(tmp_path / "empty")})
    assert found.returncode == 0, found.stderr
    assert [one["name"] for one in json.loads(found.stdout)["spec"]["folders"]] == ["dataset"]


def tiny_llama(folder: Path) -> None:
    """A real one, with a tokenizer of its own."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    size = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    hf.LlamaForCausalLM(size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_a_model_folder_and_a_text_become_a_trained_model_with_its_card(ugro: Ugro, tmp_path: Path) -> None:
    here = ugro.home / "cwd"
    tiny_llama(here / "tiny")
    (here / "text.txt").write_text("\n".join(TEXTS))
    ugro.cluster = tmp_path / "cluster.yaml"
    entry = "  n{n}: {{transport: local, remote_root: {folder}/n{n}, python: {python}}}\n"
    nodes = "".join(entry.format(n=n, folder=tmp_path, python=sys.executable) for n in (1, 2, 3))
    ugro.cluster.write_text(f"nodes:\n{nodes}")
    words = ["--model", "./tiny", "--dataset", "./text.txt", "--nodes", "3", "--name", "experiment_v1"]
    done = ugro("launch", *words, "--epochs", "1", "--seq-length", "16", "--batch-size", "12", timeout=400)
    assert done.returncode == 0, done.stderr
    assert "memory: n" in done.stderr
    home = ugro.home / "jobs" / "1"
    made = next(path for path in home.rglob("ugro.json"))
    about = json.loads(made.read_text())
    assert (about["kind"], about["base"], about["base_path"]) == ("lora", "tiny", str(here / "tiny"))
    assert (made.parent / "adapter_model.safetensors").stat().st_size > 1000
    card = (made.parent / "README.md").read_text()
    assert card.startswith("---")
    assert "n3" in card
    names = {path.name for path in home.rglob("*")}
    assert "model.safetensors" not in names, "what travelled to the nodes does not come back"
    assert sum(len(list((tmp_path / f"n{n}" / ".ugro" / "folders").glob("?" * 64))) for n in (1, 2, 3)) == 6
    assert os.path.isdir(here / "tiny")


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_takes_a_model_too(ugro: Ugro, tmp_path: Path) -> None:
    here = ugro.home / "cwd"
    tiny_llama(here / "tiny")
    (here / "text.txt").write_text("\n".join(TEXTS))
    ugro.cluster = tmp_path / "cluster.yaml"
    node = f"{{transport: local, remote_root: {tmp_path}/n1, python: {sys.executable}}}"
    ugro.cluster.write_text(f"nodes: {{n1: {node}}}\n")
    words = ["--model", "./tiny", "--dataset", "./text.txt", "--lr", "1e-3,1e-2", "--metric", "val/loss"]
    done = ugro("sweep", *words, "--epochs", "1", "--seq-length", "16", "--parallel", "1", timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(ugro("sweep", "status", "--json").stdout)["sweep"]
    assert [one["state"] for one in found["trials"]] == ["done", "done"] or found["best"], found
