"""From what a client sends to tokens: the chat template of the tokenizer, or a plain one where it has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ugro.inference.refusals import bad

Message = Mapping[str, str]
# Without a template the model has not learned where a turn ends: it would go on with the user's part.
PLAIN_STOPS = ("\nuser:", "\nsystem:")
_UNKNOWN_CONTEXT = 2048


class Prompts:
    def __init__(self, tokenizer: Any, config: Any) -> None:
        self._tokenizer = tokenizer
        self.context = _context(tokenizer, config)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    @property
    def chat_stops(self) -> tuple[str, ...]:
        return () if self.has_template else PLAIN_STOPS

    def text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Blocks for a while if the messages are long."""
        text = self._templated(messages) if self.has_template else plain(messages)
        return tuple(self._tokenizer(text, add_special_tokens=not self.has_template)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _templated(self, messages: Sequence[Message]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except TemplateError as error:  # such as: roles must alternate
            raise bad(f"the model's chat template refuses the messages: {error}", "messages") from error


def plain(messages: Sequence[Message]) -> str:
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


def _context(tokenizer: Any, config: Any) -> int:
    """The most tokens of a prompt and its answer together."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    text = config.get_text_config(decoder=True)
    found = [size for name in names if isinstance(size := getattr(text, name, None), int) and size > 0]
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and 0 < limit < 10**9:  # without one, transformers says 10**30
        found.append(limit)
    return min(found, default=_UNKNOWN_CONTEXT)
