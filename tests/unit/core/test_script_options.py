"""Whether a script can know an option, by its source."""

from __future__ import annotations

import pytest

from ugro.core.support.script_options import Knows, knows

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
