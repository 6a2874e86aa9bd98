"""``ugro note``."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.errors import UsageError


@click.command()
@click.argument("job", shell_complete=candidates.jobs)
@click.argument("text", required=False)
@click.option("--tag", "-t", "tags", multiple=True, metavar="TAG", help="Add a tag. May be repeated.")
@click.option("--untag", multiple=True, metavar="TAG", help="Remove a tag. May be repeated.")
@json_option
@pass_session
def note(session: Session, job: str, text: str | None, tags: tuple[str, ...], untag: tuple[str, ...]) -> int:
    """Show or change the note and tags of a job.

    TEXT replaces the note; an empty TEXT removes it.

    \b
    Example:
      ugro note last "larger batch" --tag baseline
    """
    if both := sorted(set(tags) & set(untag)):
        raise UsageError(f"the tag {both[0]} is added and removed", hint="use one of --tag and --untag")
    client = session.client()
    is_change = text is not None or tags or untag
    found = client.jobs.set_note(job, text, add=tags, remove=untag) if is_change else client.jobs.note(job)
    output = session.output
    if output.is_json:
        output.document({"note": found})
        return 0
    if found.tags:
        output.text(f"tags  {' '.join(found.tags)}")
    if found.text:
        output.block(found.text)
    if not found.tags and not found.text:
        output.note(f"job {found.job} has no note" + ("" if is_change else f'; write one: ugro note {found.job} "…"'))
    return 0
