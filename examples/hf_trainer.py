"""A small language model with the Hugging Face Trainer, balanced over unequal nodes: only the import differs.

    ugro launch examples/hf_trainer.py --nodes 3
    python examples/hf_trainer.py --tiny

The text is made up, so nothing is downloaded. Replace `texts` and `model` by your own.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ugro.train.integrations.huggingface import UgroTrainer as Trainer

WORDS = 512


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Of different lengths: each word is the sum of the two before it."""
    made = torch.Generator().manual_seed(1)
    found = []
    for length in torch.randint(8, 64, (count,), generator=made).tolist():
        text = torch.randint(1, 32, (2,), generator=made).tolist()
        while len(text) < length:
            text.append(1 + (text[-1] + text[-2]) % (WORDS - 1))
        found.append({"input_ids": torch.tensor(text)})
    return found


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad([sample["input_ids"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": inputs, "attention_mask": (inputs > 0).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per device")
    parser.add_argument("--tiny", action="store_true", help="a few seconds on a CPU")
    wanted = parser.parse_args()
    width = 32 if wanted.tiny else 256
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes))
    arguments = TrainingArguments(
        output_dir="hf_trainer",
        num_train_epochs=wanted.epochs,
        per_device_train_batch_size=wanted.batch_size,
        learning_rate=3e-3,
        logging_steps=1 if wanted.tiny else 10,
        save_strategy="epoch",
        save_total_limit=2,
        eval_strategy="epoch",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    data = texts(256 if wanted.tiny else 8192)
    held_out = len(data) // 8
    trainer = Trainer(
        model, arguments, data_collator=padded, train_dataset=data[held_out:], eval_dataset=data[:held_out]
    )
    trainer.train()
    trainer.save_model("hf_trainer/model")


if __name__ == "__main__":
    main()
