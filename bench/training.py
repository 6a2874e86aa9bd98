"""A minimal training that records when it started and when its first step was done; torchrun can start it too.

    torchrun … training.py FOLDER
"""

# ruff: noqa: E402 - the clock is read before anything else is loaded, torch above all
import time

FIRST_LINE = time.time()

import os
import sys
from pathlib import Path


def main() -> None:
    _note("first-line", FIRST_LINE)
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    _note("first-step", time.time())
    distributed.destroy_process_group()
    os._exit(0)  # PyTorch's threads abort a rank now and then on its way out; all that counts is done


def _note(what: str, at: float) -> None:
    Path(sys.argv[1], f"{what}.{os.environ['RANK']}").write_text(f"{at!r}\n")


if __name__ == "__main__":
    main()
