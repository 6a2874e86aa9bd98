"""Whether a script can know an option, by its source."""

from __future__ import annotations

import pytest

from ugro.kernel.jobs.script import Knows, knows

ARGPARSE = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\na = p.parse_args()\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("print(1)", Knows.NO),
        ("import torch, numpy as np\nfrom torch import nn\nprint(1)", Knows.NO),
        (ARGPARSE, Knows.NO),
        (ARGPARSE.replace("--lr", "--ndoes"), Knows.YES),
        (ARGPARSE.replace("--lr", "--ndoes-of-mine"), Knows.YES),  # argparse takes a beginning
        (ARGPARSE.replace("parse_args", "parse_known_args"), Knows.MAYBE),
        (ARGPARSE.replace("'--lr'", "'rest', nargs=argparse.REMAINDER"), Knows.MAYBE),
        ("import click\n@click.command()\n@click.option('--lr')\ndef main(lr): ...", Knows.NO),
        ("import click\nc = dict(ignore_unknown_options=True)", Knows.MAYBE),
        ("import fire\nfire.Fire()", Knows.MAYBE),
        ("import hydra", Knows.MAYBE),
        ("from transformers import HfArgumentParser", Knows.MAYBE),
        ("import sys\nprint(sys.argv)", Knows.MAYBE),
        ("from sys import argv", Knows.MAYBE),
        ("import runpy\nrunpy.run_path('x.py')", Knows.MAYBE),
        ("from . import options", Knows.MAYBE),
        ("import options_of_mine", Knows.MAYBE),
        ("def main(ndoes=3): ...", Knows.MAYBE),
        ("config = {'ndoes': 3}", Knows.MAYBE),
        ("this is no Python", Knows.MAYBE),
        ("\0", Knows.MAYBE),
    ],
)
def test_what_a_script_says_of_an_option(source: str, found: Knows) -> None:
    assert knows(source, "--ndoes") is found


def test_dashes_and_underscores_are_alike() -> None:
    assert knows("p.add_argument('--batch_size')", "--batch-size") is Knows.YES
    assert knows("def main(batch_size): ...", "--batch-size") is Knows.MAYBE


def test_an_option_with_one_dash_is_there_as_it_is_or_may_be() -> None:
    for option in ("-n", "-nodes"):
        assert knows(ARGPARSE, option) is Knows.NO
        assert knows(ARGPARSE.replace("'--lr'", f"'{option}', '--lr'"), option) is Knows.YES
        assert knows("import sys\nprint(sys.argv)", option) is Knows.MAYBE
    assert knows(ARGPARSE + "'x -n 3'", "-n") is Knows.NO
