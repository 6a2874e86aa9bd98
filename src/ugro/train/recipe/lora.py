"""LoRA: a few small matrices are trained beside a frozen model, so that a step exchanges megabytes, not gigabytes."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ugro.core.errors import UsageError
from ugro.train.recipe.precision import Precision


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
