from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from ugro.features.services.inference.openai import ChatBody, CompletionBody, EmbedBody, GenerateBody

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("name", ["temperature", "top_p", "frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_before_a_model_computes_with_it(name: str, value: str) -> None:
    """Python's reader of JSON takes them."""
    with pytest.raises(ValidationError, match=name):
        ChatBody(messages=HELLO, **json.loads(f'{{"{name}": {value}}}'))
    with pytest.raises(ValidationError, match=name):
        CompletionBody(prompt="x", **json.loads(f'{{"{name}": {value}}}'))


@pytest.mark.parametrize(
    ("kind", "body"), [(GenerateBody, {"text": "x", "stop": [""]}), (EmbedBody, {"texts": ["x", ""]})]
)
def test_an_empty_text_where_one_is_needed_is_refused(kind: Any, body: dict[str, Any]) -> None:
    """An empty stop text would end every answer before it begins."""
    with pytest.raises(ValidationError):
        kind(**body)
