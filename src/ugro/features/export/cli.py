"""``ugro export``."""

from __future__ import annotations

from pathlib import Path

import click

from ugro.cli import candidates
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.export.client import DEFAULT_IMAGE, TARGETS
from ugro.features.export.client import export as exported
from ugro.kernel.support.errors import NotAllowed, UgroError


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="What to write it for.")
@click.option("-o", "--output", "file", type=click.Path(path_type=Path), metavar="FILE", help="Write it to FILE.")
@click.option("--image", metavar="IMAGE", default=DEFAULT_IMAGE, show_default=True, help="With kubernetes: what runs.")
@json_option
@pass_session
def export(session: Session, job: str, target: str, file: Path | None, image: str) -> None:
    """Write a job for Slurm, Kubernetes or torchrun.

    That is an sbatch script, a JobSet, or a shell script that is run on each node. Its head says how the code gets
    there, which variables have to be set because their values look secret, and what of the job the other system has no
    word for.

    \b
    Examples:
      ugro export last --to slurm -o train.sbatch
      ugro export 12 --to kubernetes --image my/image:1 | kubectl apply -f -
    """
    text = exported(session.client().jobs.get(job), target, image=image)
    if file is not None:
        _write(file, text)
        session.output.note(f"wrote {file}")
    if session.output.is_json:
        session.output.document({"export": {"target": target, "path": str(file) if file else None, "text": text}})
    elif file is None:
        session.output.block(text.removesuffix("\n"))


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError as error:
        raise NotAllowed(f"{file} exists", hint="name a new file") from error
    except OSError as error:
        raise UgroError(f"{file} cannot be written: {(error.strerror or str(error)).lower()}") from error
