from ugro.kernel.config.kinds import Whole
from ugro.kernel.config.section import Section, key, section


@section
class WordSection(Section):
    """How words in logs are counted."""

    shown: int = key(10, Whole(1, 1000), "How many words are shown.")
