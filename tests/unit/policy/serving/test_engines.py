from __future__ import annotations

import pytest

from ugro.features.services.rules.engines import ENGINES, PLACEHOLDERS, check_words, command_of, engine_named
from ugro.kernel.support.errors import ConfigError


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_gets_model_and_port_and_nothing_unknown(name: str) -> None:
    engine = engine_named(name)
    words = command_of(engine, is_adapter=False, has_key=True)
    check_words(words)
    text = " ".join(words)
    assert "{model}" in text
    assert "{port}" in text
    assert "{host}" in text


@pytest.mark.parametrize("name", ENGINES)
def test_a_key_is_never_a_word_of_a_command(name: str) -> None:
    engine = engine_named(name)
    for is_adapter in (False, True) if engine.adapter_command else (False,):
        words = command_of(engine, is_adapter=is_adapter, has_key=True)
        assert "--api-key" not in words
        assert "{key}" not in " ".join(words)
    assert "{key_file}" not in " ".join(command_of(engine, is_adapter=False, has_key=False))


def test_an_engine_that_cannot_be_given_a_key_says_so() -> None:
    silent = [engine for engine in ENGINES.values() if not engine.is_keyed]
    assert [engine.name for engine in silent] == ["sglang"]
    assert all("key" in engine.note for engine in silent)
    # UGRO's own programs are given a file by their replica; a variable with the key itself would be in their way.
    assert all(
        bool(engine.key_variable or engine.key_words) == (engine.name != "ugro")
        for engine in ENGINES.values()
        if engine.is_keyed
    )


def test_an_adapter_needs_an_engine_that_takes_its_base() -> None:
    words = command_of(engine_named("vllm"), is_adapter=True, has_key=False)
    assert words[:3] == ("vllm", "serve", "{base}")
    assert "{name}={model}" in words
    with pytest.raises(ConfigError, match=r"llama\.cpp needs a whole model") as caught:
        command_of(engine_named("llama.cpp"), is_adapter=True, has_key=False)
    assert "merge" in (caught.value.hint or "")


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vlm'") as caught:
        engine_named("vlm")
    assert caught.value.hint == "did you mean vllm?"
    with pytest.raises(ConfigError) as caught:
        engine_named("apache")
    assert "llama.cpp" in (caught.value.hint or "")


def test_a_wrong_place_in_a_command_is_noticed_and_json_is_not() -> None:
    check_words(["serve", '{"a": {"b": 1}}', "{model}:{port}", "{host}"])
    with pytest.raises(ConfigError, match=r"unknown \{prot\}") as caught:
        check_words(["serve", "--port={prot}"])
    assert caught.value.hint == "did you mean {port}?"
    assert "python" in PLACEHOLDERS
