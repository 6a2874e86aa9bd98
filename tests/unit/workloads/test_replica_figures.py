"""What replicas' engines say about themselves: each in its own words."""

from __future__ import annotations

import pytest

from ugro.features.services.node.probing import figures, values

UGRO = """\
# TYPE ugro_inference_tokens_total counter
ugro_inference_tokens_total{kind="prompt"} 12
ugro_inference_tokens_total{kind="generated"} 34
ugro_inference_batch_size_bucket{le="1"} 1
ugro_inference_batch_size_sum 10
ugro_inference_batch_size_count 4
"""
VLLM = """\
vllm:prompt_tokens_total{engine="0",model_name="m"} 5.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 7.0
vllm:generation_tokens_total{model_name="m"} 1e3
vllm:num_requests_running{model_name="m"} 3.0
"""
LLAMA = "llamacpp:prompt_tokens_total 8\nllamacpp:tokens_predicted_total 9\nllamacpp:requests_processing 2\n"
TGI = "tgi_request_input_length_sum 3\ntgi_request_generated_tokens_sum 4\ntgi_batch_current_size 1\n"


@pytest.mark.parametrize(
    ("text", "expected"), [(UGRO, (12, 34, 2.5)), (VLLM, (12, 1000, 3)), (LLAMA, (8, 9, 2)), (TGI, (3, 4, 1))]
)
def test_each_engine_is_understood(text: str, expected: tuple[float, float, float]) -> None:
    found = figures(values(text), {})
    assert (found["prompt_tokens"], found["generated_tokens"], found["batch_size"]) == expected


def test_a_batch_is_that_of_the_steps_since_the_last_look() -> None:
    before = values(UGRO)
    later = values(UGRO.replace("size_sum 10", "size_sum 26").replace("size_count 4", "size_count 6"))
    assert figures(later, before)["batch_size"] == 8
    assert figures(before, before)["batch_size"] == 0, "nothing was computed"


@pytest.mark.parametrize("text", ["", "<html>hello 3</html>", "process_cpu_seconds_total 3\n", 'x{kind="a"} 1.2.3\n'])
def test_a_page_without_them_says_nothing(text: str) -> None:
    assert figures(values(text), {}) == {}
