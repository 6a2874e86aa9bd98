"""``ugro words JOB``: the most common words in a job's log. An example of a feature in a package of its own."""

from ugro.kernel.feature import Command, Feature, Page

FEATURE = Feature(
    "words",
    __name__,
    commands={"words": Command("ugro_words.cli:words", "Count the words in a job's log.", "Results")},
    settings={"words": "ugro_words.config:WordSection"},
    pages={"GET /words/{word}": Page(of="job")},
    service="ugro_words.service:Words",
)
