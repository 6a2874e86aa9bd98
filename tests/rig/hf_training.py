"""A rank's script: a training with the Hugging Face Trainer, of texts of different lengths. It works alone, too.

    python -m tests.rig.hf_training --loss tokens --batch 4 --accumulate 2 --then --loss mean …

Importing the library takes longer than a training, so one process may do several. The result of each: the weights at
the end, what was logged, and beside it which samples this rank used in which update.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES, WORDS = 67, 40


class Texts(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, is_classified: bool) -> None:
        made = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 20, (SAMPLES,), generator=made).tolist()
        self._texts = [torch.randint(1, WORDS, (length,), generator=made) for length in lengths]
        self._is_classified = is_classified

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = self._texts[index]
        return {"input_ids": text, "labels": int(text.sum() % 3) if self._is_classified else text}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [sample["input_ids"] for sample in samples]
    inputs = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    if isinstance(samples[0]["labels"], int):
        return {"input_ids": inputs, "attention_mask": mask, "labels": torch.tensor([one["labels"] for one in samples])}
    labels = nn.utils.rnn.pad_sequence([one["labels"] for one in samples], batch_first=True, padding_value=-100)
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def language_model() -> Any:
    from transformers import LlamaForCausalLM

    from tests.rig.models import llama_config

    options = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(5)
    return LlamaForCausalLM(llama_config(WORDS, **options, num_key_value_heads=1, initializer_range=0.1)).double()


class Classifier(nn.Module):  # type: ignore[misc]
    """A model that knows nothing of ``num_items_in_batch``: its loss is a mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.head = nn.Embedding(WORDS, 8).double(), nn.Linear(8, 3).double()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, Any]:
        mean = (self.words(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.head(mean)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def loss_over_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


def _base(arguments: argparse.Namespace) -> Any:
    if arguments.plain:
        from transformers import Trainer

        return Trainer
    from ugro.train.integrations.huggingface import UgroTrainer, UgroTrainerMixin

    if not arguments.mixin:
        return UgroTrainer
    from transformers import Seq2SeqTrainer

    return type("Mixed", (UgroTrainerMixin, Seq2SeqTrainer), {})


def trainer_class(arguments: argparse.Namespace, number: int) -> Any:
    Base = _base(arguments)  # noqa: N806
    seen = Path(os.environ["RESULT"]).with_suffix(f".seen_{number}")
    rank = int(os.environ.get("RANK", "0"))

    class Recorder(Base):  # type: ignore[misc,valid-type]
        def get_batch_samples(self, *others: Any) -> Any:
            slots, items = super().get_batch_samples(*others)
            if not arguments.plain:
                own = [index for slot in slots for portion, _ in slot if portion.own for index in portion.indices]
                time.sleep(arguments.pause * (rank + 1) * len(own))
                with seen.open("a") as file:
                    file.write(json.dumps([self.state.global_step, own]) + "\n")
            return slots, items

    if arguments.loss == "own":

        class OwnLoss(Recorder):
            """A mean over the labels of the batch that it is given."""

            loss_is_scaled_for_ga = False

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                loss = nn.functional.cross_entropy(logits, wanted)
                return (loss, outputs) if return_outputs else loss

        return OwnLoss
    return Recorder


def main() -> None:
    torch.set_num_threads(1)
    trainings: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == "--then":
            trainings.append([])
        else:
            trainings[-1].append(word)
    found = [trained(parse(words), number) for number, words in enumerate(trainings)]
    Path(os.environ["RESULT"]).write_text(json.dumps(found))


def trained(arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    from transformers import Seq2SeqTrainingArguments

    is_classified = arguments.loss == "mean"
    options: dict[str, Any] = {"label_smoothing_factor": 0.1} if arguments.loss == "smooth" else {}
    args = Seq2SeqTrainingArguments(
        output_dir=arguments.output, per_device_train_batch_size=arguments.batch, num_train_epochs=arguments.epochs,
        gradient_accumulation_steps=arguments.accumulate, learning_rate=0.01, lr_scheduler_type="linear",
        train_sampling_strategy="random" if arguments.shuffle else "sequential", logging_steps=1, report_to="none",
        save_strategy="steps" if arguments.save_steps else "no", save_steps=arguments.save_steps or 500, seed=7,
        average_tokens_across_devices=arguments.average, disable_tqdm=True, dataloader_num_workers=arguments.workers,
        eval_strategy="epoch" if arguments.evaluate else "no", include_num_input_tokens_seen="non_padding",
        dataloader_pin_memory=False, use_cpu=True, **options,
    )  # fmt: skip
    trainer = trainer_class(arguments, number)(
        Classifier() if is_classified else language_model(),
        args,
        train_dataset=Texts(is_classified),
        eval_dataset=torch.utils.data.Subset(Texts(is_classified), range(11)),
        data_collator=padded,
        compute_loss_func=loss_over_items if arguments.loss == "func" else None,
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    return {
        "weights": weights,
        "losses": [record["loss"] for record in trainer.state.log_history if "loss" in record],
        "evaluated": [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record],
        "norms": [record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record],
        "tokens": trainer.state.num_input_tokens_seen,
        "steps": trainer.state.global_step,
    }


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", choices=("tokens", "mean", "smooth", "func", "own"), default="tokens")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--average", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--plain", action="store_true", help="transformers' own Trainer")
    parser.add_argument("--mixin", action="store_true", help="another Trainer, with the mixin")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--resume")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
