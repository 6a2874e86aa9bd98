"""Whether a training fits: said in a few lines; what cannot fit is refused with the nearest that can."""

from __future__ import annotations

import pytest

from ugro.features.recipes.rules import shape_of
from ugro.features.recipes.rules_memory import Device, Mode, Verdict, judge, known_config, training_of
from ugro.features.recipes.trainings import catalog

GB = 10**9
BIG, SMALL = Device("master", "RTX 5070 Ti", 12 * GB, is_cpu=False), Device("gpu1", "RTX 4070", 8 * GB, is_cpu=False)
LAPTOP = Device("box", "memory", 16 * GB, is_cpu=True)


def judged(hub_id: str, words: str, *devices: Device, recipe: str = "causal_lm") -> Verdict:
    shape = shape_of(known_config(hub_id) or {})
    assert shape is not None
    return judge(shape, training_of(words.split(), catalog.find(recipe), devices), devices)


def test_what_fits_is_said_for_each_kind_of_device() -> None:
    found = judged("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "--seq-length 512 --batch-size 3", BIG, SMALL, SMALL)
    assert found.problem is None
    assert found.lines[0] == "1.1 billion parameters, 2.3 million trained (lora)"
    assert [line.partition(":")[0] for line in found.lines[1:]] == ["master (RTX 5070 Ti)", "gpu1 (RTX 4070)"]


def test_a_7b_model_is_refused_on_8_gb_and_four_bits_are_offered() -> None:
    found = judged("huggyllama/llama-7b", "--batch-size 3", BIG, SMALL, SMALL)
    assert found.problem is not None
    assert found.problem.startswith("does not fit gpu1 (RTX 4070): it needs 1")
    assert found.hint is not None
    assert found.hint.startswith("this fits: --qlora")
    assert judged("huggyllama/llama-7b", found.hint.removeprefix("this fits: "), BIG, SMALL, SMALL).problem is None


def test_nodes_with_room_are_offered_too() -> None:
    found = judged("Qwen/Qwen2.5-1.5B", "--full --batch-size 2", Device("a100", "A100", 80 * GB, is_cpu=False), SMALL)
    assert found.hint is not None
    assert "without --full" in found.hint
    assert found.hint.endswith("nodes with room: --nodes 1 --only a100")


def test_a_gpu_takes_its_share_in_parts_and_a_cpu_does_not() -> None:
    words = "--batch-size 64 --seq-length 1024"
    on_gpu = judged("openai-community/gpt2", words, SMALL)
    assert on_gpu.problem is None
    assert "of 64 samples at once" in on_gpu.lines[1]
    on_cpu = judged("openai-community/gpt2", words, LAPTOP)
    assert on_cpu.problem is not None
    assert on_cpu.hint is not None
    assert judged("openai-community/gpt2", on_cpu.hint.removeprefix("this fits: "), LAPTOP).problem is None


def test_what_never_fits_is_said() -> None:
    tiny = Device("phone", "memory", GB, is_cpu=True)
    found = judged("huggyllama/llama-13b", "", tiny)
    assert found.hint == "no setting of this recipe fits: choose a smaller model, or other nodes"


@pytest.mark.parametrize(
    ("words", "mode", "samples", "rank", "length"),
    [
        ("", Mode.LORA, 16, 16, 1024),
        ("--full --batch_size 9", Mode.FULL, 5, 16, 1024),
        ("--qlora --lora_r=8,32 --seq-length 128..512", Mode.QLORA, 16, 32, 512),
    ],
)
def test_the_words_of_the_script_are_read_also_those_of_a_sweep(
    words: str, mode: Mode, samples: int, rank: int, length: int
) -> None:
    found = training_of(words.split(), catalog.find("causal_lm"), [BIG, SMALL])
    assert (found.mode, found.samples, found.rank, found.seq_length) == (mode, samples, rank, length)
    assert found.value_bytes == 2
    assert training_of(["--dtype", "bf16"], catalog.find("causal_lm"), [LAPTOP]).value_bytes == 2
    assert training_of([], catalog.find("causal_lm"), [LAPTOP]).value_bytes == 4
    assert training_of([], catalog.find("image_classification"), [BIG]).mode is Mode.FULL
