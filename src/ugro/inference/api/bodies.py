"""What clients send. A field that is not named here is refused by name, rather than ignored in silence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_CHOICES = 8
MOST_STOPS = 4
MOST_TEXTS = 2048
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    # Bookkeeping of OpenAI's own service: no effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Generation(Body):
    """What a chat and a completion have in common."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MOST_STOPS or not all(stops):
            raise ValueError(f"at most {MOST_STOPS} texts, none of them empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if not all(token.isdecimal() and -100 <= value <= 100 for token, value in (bias or {}).items()):
            raise ValueError("numbers of tokens with values from -100 to 100")
        return bias


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None  # clients send the assistant's message back as they got it

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class PlainText(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatBody(Generation):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    response_format: PlainText | None = None
    store: Literal[False] | None = None


class CompletionBody(Generation):
    prompt: str | list[str] | list[int] | list[Tokens]
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: None = None


class EmbeddingBody(Body):
    input: str | list[str]
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None


class GenerateBody(Body):
    text: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)
    stop: list[Text] = Field(default=[], max_length=MOST_STOPS)
    seed: int | None = None


class ClassifyBody(Body):
    texts: list[str] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
    images: list[str] | None = Field(None, min_length=1, max_length=MOST_TEXTS, description="base64, or data: URLs")
    top: int | None = Field(None, ge=1)


class EmbedBody(Body):
    texts: list[Text] = Field(min_length=1, max_length=MOST_TEXTS)


class PredictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inputs: list[Any] = Field(min_length=1, max_length=MOST_TEXTS)
