"""What recipes train with: updates of the parameters, LoRA, precision, and evaluation."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train.recipe.command_line import Progress, say, size_of
from ugro.train.run import Run

# --- evaluation -------------------------------------------------------------------------------------------------------
# Evaluation on all ranks: each sample once, faster ranks take more, and sums are added before anything is divided.


def own_part(count: int, shares: Sequence[int], rank: int) -> range:
    """This rank's samples, in proportion to its share of a batch."""
    total, before = sum(shares), sum(shares[:rank])
    return range(count * before // total, count * (before + shares[rank]) // total)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """``model`` is the one inside run.wrap: ranks compute alone, without an exchange."""
    import torch

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def own_batches(run: Run, dataset: Any, collate: Any) -> Any:
    """Batches of this rank's part, as large as its share of a training batch, for which there is memory."""
    from torch.utils.data import DataLoader, Subset

    part = own_part(len(dataset), run.plan, run.rank)
    return DataLoader(Subset(dataset, part), batch_size=max(1, run.plan[run.rank]), collate_fn=collate)


def summed(run: Run, numbers: Sequence[float]) -> list[float]:
    return [math.fsum(one) for one in zip(*run.gather(*numbers), strict=True)]


def report(run: Run, scores: Mapping[str, float]) -> None:
    """Logged as val/loss and so on."""
    if run.is_main:
        run.log(step=None, **{f"val/{name}": value for name, value in scores.items()})
    words = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
    say(run, f"epoch {run.progress.epoch + 1}  evaluation: {words}")


class Counts:
    """What a classification got right, by class."""

    def __init__(self, classes: int) -> None:
        import torch

        self.loss = 0.0
        self._right, self._said, self._true = torch.zeros(3, classes, dtype=torch.float64)

    def add(self, logits: Any, labels: Any) -> None:
        """Of one batch."""
        import torch

        logits, labels = logits.detach().float().cpu(), labels.cpu()
        self.loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        said = logits.argmax(-1)
        for counts, found in ((self._right, labels[said == labels]), (self._said, said), (self._true, labels)):
            counts += torch.bincount(found, minlength=len(counts)).to(counts.dtype)

    def scores(self, run: Run) -> dict[str, float]:
        """Over the samples of all ranks."""
        classes = len(self._true)
        own = [self.loss, *self._right.tolist(), *self._said.tolist(), *self._true.tolist()]
        loss, *rest = summed(run, own)
        right, said, true = rest[:classes], rest[classes : 2 * classes], rest[2 * classes :]
        samples = sum(true)
        return {"loss": loss / samples, "accuracy": sum(right) / samples, "f1": macro_f1(right, said, true)}


def macro_f1(right: Sequence[float], said: Sequence[float], true: Sequence[float]) -> float:
    """The mean over classes that occur, in the data or among the answers."""
    each = [2 * r / (s + t) for r, s, t in zip(right, said, true, strict=True) if s + t]
    return sum(each) / len(each) if each else 0.0


class Results:
    """The newest scores, which a checkpoint keeps: a training that resumes after its end still reports them."""

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = dict(state["scores"])


# --- precision --------------------------------------------------------------------------------------------------------
# The precision of a training: the same on all ranks, so that their weights and updates agree.


_CPU, _FP16, _BF16 = range(3)  # what a device computes well


@dataclass(frozen=True, slots=True)
class Precision:
    name: str  # bf16, fp16, fp32
    device: Any

    @classmethod
    def of(cls, run: Run, wanted: str) -> Precision:
        """``auto`` is the best that the devices of all ranks have."""
        least = int(min(level for (level,) in run.gather(float(_level(run.device)))))
        if wanted == "auto":
            wanted = {_BF16: "bf16", _FP16: "fp16", _CPU: "fp32"}[least]
        if wanted == "fp16" and least == _CPU:
            raise UsageError("fp16 needs a GPU on every node", hint="use --dtype bf16 or fp32")
        return cls(wanted, run.device)

    @property
    def dtype(self) -> Any:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.name]

    def autocast(self) -> Any:
        import torch

        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scaler(self) -> Any:
        """Gradients of fp16 become zero without one."""
        import torch

        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None


def _level(device: Any) -> int:
    import torch

    if device.type != "cuda":
        return _CPU
    return _BF16 if torch.cuda.is_bf16_supported(including_emulation=False) else _FP16


# --- lora -------------------------------------------------------------------------------------------------------------
# LoRA: a few small matrices are trained beside a frozen model, so that a step exchanges megabytes, not gigabytes.


def load_options(arguments: argparse.Namespace, precision: Precision) -> dict[str, Any]:
    """Options of ``from_pretrained``. Frozen weights have the precision of the computation, trained ones fp32."""
    import torch

    common = {"use_safetensors": True, "trust_remote_code": arguments.trust_remote_code}
    if not getattr(arguments, "qlora", False):
        return {**common, "dtype": torch.float32 if arguments.full else precision.dtype}
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision.dtype,
    )  # fmt: skip
    device = {"": precision.device.index}
    return {**common, "dtype": precision.dtype, "quantization_config": four_bits, "device_map": device}


def check(arguments: argparse.Namespace, precision: Precision) -> None:
    """Whether --qlora can work here."""
    if not arguments.qlora:
        return
    if precision.device.type != "cuda":
        raise UsageError("--qlora needs an NVIDIA GPU on every node", hint="without --qlora, LoRA runs on CPUs too")
    if importlib.util.find_spec("bitsandbytes") is None:
        hint = "add bitsandbytes to the job's environment; see docs/environments.md"
        raise UsageError("--qlora needs the package bitsandbytes", hint=hint)


def prepared(model: Any, arguments: argparse.Namespace, task: str) -> Any:
    """The model as it is trained. ``task``: one of peft's, such as CAUSAL_LM."""
    model.config.use_cache = False
    model.train()  # loaded models are in the mode for evaluation
    if arguments.qlora:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=arguments.gradient_checkpointing)
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model if arguments.full else _adapted(model, arguments, task)


def _adapted(model: Any, arguments: argparse.Namespace, task: str) -> Any:
    from peft import LoraConfig, get_peft_model

    configuration = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha or 2 * arguments.lora_r,
        target_modules=_targets(model, arguments.lora_targets),
        fan_in_fan_out=_has_transposed_layers(model),
        task_type=task,
    )
    try:
        return get_peft_model(model, configuration)
    except ValueError as error:
        hint = "name its layers with --lora-targets, or use all-linear"
        raise UsageError(f"LoRA cannot be added: {error}", hint=hint) from error


def _targets(model: Any, wanted: str | None) -> Any:
    """None leaves the choice to peft, which knows the usual layers of many architectures."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    if wanted:
        return wanted if wanted == "all-linear" else wanted.split(",")
    return None if model.config.model_type in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING else "all-linear"


def _has_transposed_layers(model: Any) -> bool:
    """GPT-2's layers store their weights the other way round; peft warns if it is not said."""
    return any(type(module).__name__ == "Conv1D" for module in model.modules())


class Trained:
    """What a checkpoint keeps of a model whose other parameters are frozen."""

    def __init__(self, model: Any) -> None:
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        return {name: one.detach() for name, one in self._parameters.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self._parameters.keys():
            raise UsageError(
                "the checkpoint is of a model with other trained parameters",
                hint="resume with the same --model, --full, --lora-r and --lora-targets",
            )
        import torch

        with torch.no_grad():
            for name, one in self._parameters.items():
                one.copy_(state[name])


def kept(model: Any) -> Any:
    """For run.keep: the model, or of a partly frozen one the trained parameters alone."""
    return model if all(one.requires_grad for one in model.parameters()) else Trained(model)


def trained_bytes(model: Any) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)


# --- updates ----------------------------------------------------------------------------------------------------------


_LARGEST_NORM = 1.0


class Updates:
    def __init__(
        self,
        run: Run,
        model: Any,
        arguments: argparse.Namespace,
        precision: Precision,
        steps_per_epoch: int,
        lr: float,
    ) -> None:
        """``lr`` is the default of --lr."""
        import torch

        self._run, self._precision = run, precision
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self.steps = steps_of(arguments, steps_per_epoch)
        self.epochs = math.ceil(self.steps / steps_per_epoch)
        self._every = arguments.checkpoint_steps
        self.lr = arguments.lr or lr
        self.optimizer = torch.optim.AdamW(_groups(self._parameters, arguments.weight_decay), lr=self.lr)
        rule = rise_and_fall(self.steps, math.ceil(arguments.warmup * self.steps))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rule)
        self.scaler = precision.scaler()
        self._progress = Progress(run, self.steps)

    def kept(self) -> dict[str, Any]:
        """For run.keep."""
        found = {"optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}
        return {name: one for name, one in found.items() if one is not None}

    def step(self, loss_of: Callable[[Any], Any], batch: Any) -> None:
        """``loss_of`` gives the mean loss of a part of the batch."""
        import torch

        loss = self._run.step(self._in_precision(loss_of), batch, scaler=self.scaler)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, _LARGEST_NORM)
        rate = self.schedule.get_last_lr()[0]
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self._run.log(loss=loss, lr=rate, grad_norm=norm)
        self._progress.step(loss.item, rate)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The rest of the epoch, or of --steps, with checkpoints on the way."""
        while_trained = iter(loader) if not self._is_over else iter(())
        for batch in while_trained:
            yield batch
            if self._is_over:
                return
            if self._every and self._run.progress.step % self._every == 0:
                self._run.checkpoint()

    @property
    def _is_over(self) -> bool:
        """A trial, which measures a few steps before a launch, ends by itself."""
        return self._run.surroundings.trial is None and self._run.progress.step >= self.steps

    def facts(self) -> dict[str, str]:
        """For the model card."""
        trained = sum(one.numel() for one in self._parameters)
        size_bytes = sum(one.numel() * one.element_size() for one in self._parameters)
        return {
            "steps": f"{self._run.progress.step:,}",
            "trained parameters": f"{trained:,}",
            "gradients exchanged in a step": size_of(size_bytes),
            "peak learning rate": f"{self.lr:.3g}",
            "precision": self._precision.name,
        }

    def _in_precision(self, loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def computed(part: Any) -> Any:
            with self._precision.autocast():
                return loss_of(part)

        return computed


def rise_and_fall(steps: int, rising: int) -> Callable[[int], float]:
    """The learning rate's factor: up in a line, then down along half a cosine."""

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising)))

    return factor


def steps_of(arguments: argparse.Namespace, steps_per_epoch: int) -> int:
    whole = int(arguments.epochs * steps_per_epoch)
    return min(whole, int(arguments.steps)) if arguments.steps else whole


def _groups(parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Biases and the scales of norms are not decayed."""
    matrices = [one for one in parameters if one.dim() > 1]
    others = [one for one in parameters if one.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
