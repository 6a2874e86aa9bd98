"""The API's routes for notes and tags of jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import FastAPI, Response
from pydantic import Field

from ugro.features.experiments.model import Note, checked_tags, checked_text
from ugro.features.experiments.store import NoteStore
from ugro.kernel.jobs.service import JobService
from ugro.kernel.operations.responses import Body, json_response

_LONGEST = 100_000  # longer bodies are refused
_MOST = 1000
Tags = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=_MOST)]


class NoteBody(Body):
    """Fields that are left out do not change. Sending the same body twice has no further effect."""

    text: Annotated[str, Field(max_length=_LONGEST)] | None = None
    tags: Tags | None = None  # all of them
    add: Tags = Field(default_factory=list)
    remove: Tags = Field(default_factory=list)

    def change(self, note: Note) -> Note:
        text = note.text if self.text is None else checked_text(self.text)
        tags = note.tags if self.tags is None else tuple(self.tags)
        kept = [tag for tag in (*tags, *self.add) if tag not in self.remove]
        return replace(note, text=text, tags=checked_tags(kept))


def add_note_routes(app: FastAPI, jobs: JobService, notes: NoteStore) -> None:
    @app.get("/v1/jobs/{word}/notes")
    async def of(word: str) -> Response:
        return json_response({"note": await notes.get((await jobs.find(word)).id)})

    @app.put("/v1/jobs/{word}/notes")
    async def change(word: str, body: NoteBody) -> Response:
        job = await jobs.find(word)
        return json_response({"note": await notes.change(job.id, body.change)})
