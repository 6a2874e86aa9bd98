"""A small classifier with Accelerate, balanced over unequal nodes.

    ugro launch examples/accelerate_train.py --nodes 3
    python examples/accelerate_train.py --tiny

The data are made up. Lines that end in `# ugro` differ from a script without UGRO.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from ugro.train.integrations.accelerate import UgroAccelerator as Accelerator  # ugro

FEATURES, CLASSES = 32, 4


def samples(count: int) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=made)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="per device")
    parser.add_argument("--tiny", action="store_true", help="a few seconds on a CPU")
    wanted = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    width = 64 if wanted.tiny else 2048
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = samples(2048 if wanted.tiny else 200_000)
    loader = torch.utils.data.DataLoader(data, batch_size=wanted.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()  # ugro
    for epoch in accelerator.epochs(wanted.epochs):  # ugro
        for inputs, wanted_classes in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), wanted_classes)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
        accelerator.save_state()  # ugro: without a folder, where a job resumes from


if __name__ == "__main__":
    main()
