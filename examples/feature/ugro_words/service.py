from __future__ import annotations

from collections import Counter

from ugro.kernel.access.model import Caller
from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.operations import ReadJobLog
from ugro.kernel.operations.request import answers
from ugro_words.config import WordSection
from ugro_words.operations import CountedWords, CountWords, WordCount


class Words:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @answers(CountWords)
    async def count(self, asked: CountWords, caller: Caller) -> CountedWords:
        job = await self._agent.jobs.find(asked.word)
        counts: Counter[bytes] = Counter()
        rest = b""  # a word may be cut by the end of a piece
        async for piece in await self._agent.jobs.read_log(ReadJobLog(str(job.id)), caller):
            whole, end, last = (rest + piece).rpartition(b"\n")
            counts.update(whole.split())
            rest = last if end else rest + piece
        counts.update(rest.split())
        shown = self._agent.cluster.config.section(WordSection).shown
        counted = [WordCount(word.decode("utf-8", "replace"), times) for word, times in counts.most_common(shown)]
        return CountedWords(job.id, tuple(counted))
