import click

from ugro.cli.output import Cell
from ugro.cli.session import Session, json_option, pass_session
from ugro_words.operations import CountWords


@click.command()
@click.argument("job")
@json_option
@pass_session
def words(session: Session, job: str) -> None:
    """Count the words in a job's log."""
    counted = session.client().ask(CountWords(job))
    if session.output.is_json:
        session.output.document(counted)
    else:
        rows = [[Cell(one.word), Cell(str(one.times), is_number=True)] for one in counted.words]
        session.output.table(("WORD", "TIMES"), rows)
