"""Trains a GPT that is cut into stages, one for each GPU or CPU: for models that are too large for any of them.

    ugro launch examples/train_pipeline.py --nodes 3 -- --layers 24 --width 1024
    python examples/train_pipeline.py --tiny           # alone, in seconds

The model and the text are those of train_gpt.py. Unequal devices get unequal numbers of layers.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from train_gpt import Gpt, Text, made_up_text, parse_arguments

import ugro.train as ut


def main() -> None:
    arguments = parse_arguments()
    run = ut.init(seed=arguments.seed)
    text = arguments.data.read_text() if arguments.data else made_up_text(arguments.sentences)
    dataset = Text(text, arguments.context)
    gpt = Gpt(len(dataset.letters), arguments)
    model = run.wrap(gpt, parallel="pipeline", layers="blocks", before="embed", after="logits")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    run.keep(model=model, optimizer=optimizer)  # layers take their optimizer state along when they move
    loader = run.loader(dataset, global_batch=arguments.global_batch, drop_last=True)

    def loss_of(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        before, after = part[0].to(run.device), part[1].to(run.device)
        return functional.cross_entropy(model(before).flatten(0, 1), after.flatten())

    for epoch in run.epochs(arguments.epochs):
        for number, batch in enumerate(loader):  # the same on every rank
            loss = run.step(loss_of, batch)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if run.is_main and number % 20 == 0:
                print(f"epoch {epoch} step {number} of {len(loader)} loss {loss.item():.4f}", flush=True)
        run.checkpoint()
    model.eval()
    with torch.no_grad():  # all ranks call the model, and all get what it returns
        likeliest = model(dataset[0][0][None].to(run.device)).argmax(-1)[0].cpu()
    if run.is_main:
        print(dataset.text(likeliest), flush=True)
    run.close()


if __name__ == "__main__":
    main()
