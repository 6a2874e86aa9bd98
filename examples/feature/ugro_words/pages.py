from fastapi import FastAPI, Request, Response

from ugro.kernel.operations.request import CALLER
from ugro.web.site import Site
from ugro_words.operations import CountWords
from ugro_words.service import Words


def add_pages(app: FastAPI, site: Site) -> None:
    @app.get("/words/{word}")
    async def words(request: Request, word: str) -> Response:
        counted = await Words(site.agent).count(CountWords(word), request.scope[CALLER])
        return await site.render(request, "words.html", cli=f"ugro words {counted.job}", counted=counted)
