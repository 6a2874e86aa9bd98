"""Data parallel with PyTorch's DDP: a complete model on each rank, gradients exchanged in every step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import group as frozen
from ugro.train.parallel.way import Way
from ugro.train.rules.sync import AUTO, Measured, Method, choose, wished
from ugro.train.stepping import Stepping
from ugro.train.telemetry import Word

# --- low rank ---------------------------------------------------------------------------------------------------------
# Gradients of low rank with error feedback (PowerSGD), with a schedule of its own.
#
# torch's hook waits inside the threads of the exchange, and stands still on Gloo with more than one bucket. Here all
# buckets are exchanged with the last one, by the thread that has computed them, which has nothing else to do by then.


_RANK = 4
_LEAST_SAVED = 2  # how many times smaller a matrix must become


class LowRank:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._errors: dict[int, Any] = {}  # what earlier steps did not send, by parameter
        self._bases: dict[int, Any] = {}
        self._waiting: list[tuple[list[tuple[int, Any]], Any, Any]] = []  # gradients, buffer and future of a bucket

    def reduce(self, bucket: Any) -> Any:
        import torch

        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.is_cuda else None
        future: Any = torch.futures.Future(devices=devices)
        keys = [id(one) for one in bucket.parameters()]
        self._waiting.append((list(zip(keys, bucket.gradients(), strict=True)), buffer, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._exchange([pair for pairs, _, _ in waiting for pair in pairs])
            for _, whole, one in waiting:
                one.set_result(whole)
        return future

    def bytes_of(self, parameters: Iterable[Any]) -> int:
        """What a step sends of such parameters."""
        return sum(4 * (_RANK * sum(_shape(one)) if _is_compressed(one) else one.numel()) for one in parameters)

    def forget(self) -> None:
        self._errors.clear()

    # --- the exchange -------------------------------------------------------------------------------------------

    def _exchange(self, gradients: list[tuple[int, Any]]) -> None:
        import torch

        small = [one for _, one in gradients if not _is_compressed(one)]
        large = [(key, one) for key, one in gradients if _is_compressed(one)]
        for one, mean in zip(small, self._means(small), strict=True):
            one.copy_(mean)
        matrices = [self._with_error(key, one) for key, one in large]
        lefts = self._means(
            [matrix @ self._base(key, matrix) for (key, _), matrix in zip(large, matrices, strict=True)]
        )
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        own = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights = self._means(own)
        for (key, one), matrix, left, mine, right in zip(large, matrices, lefts, own, rights, strict=True):
            one.copy_((left @ right.T).view_as(one))
            # All ranks have the same sum here. A GradScaler tries scales that are too large, and skips such a step;
            # what is remembered of it would spoil every later one.
            if bool(right.isfinite().all()):
                self._errors[key] = matrix - left @ mine.T
                self._bases[key] = right

    def _with_error(self, key: int, gradient: Any) -> Any:
        matrix = gradient.reshape(gradient.shape[0], -1).float()
        error = self._errors.get(key)
        return matrix.clone() if error is None else matrix + error

    def _base(self, key: int, matrix: Any) -> Any:
        """From the step before; at first some of its own, the same on all ranks."""
        import torch

        if key not in self._bases:
            made = torch.Generator().manual_seed(matrix.shape[0] * 1_000_003 + matrix.shape[1])
            base = torch.randn(matrix.shape[1], _RANK, generator=made).to(matrix.device)
            self._bases[key] = base
        return torch.linalg.qr(self._bases[key]).Q

    def _means(self, values: list[Any]) -> list[Any]:
        import torch
        from torch import distributed

        if not values:
            return []
        flat = torch.cat([one.reshape(-1).float() for one in values]).div_(self._ranks)
        distributed.all_reduce(flat)
        pieces = flat.split([one.numel() for one in values])
        return [piece.view_as(one) for piece, one in zip(pieces, values, strict=True)]


def _shape(values: Any) -> tuple[int, int]:
    return int(values.shape[0]), int(values.numel() // max(1, values.shape[0]))


def _is_compressed(values: Any) -> bool:
    if values.dim() < 2:
        return False
    rows, columns = _shape(values)
    return min(rows, columns) > _RANK and _LEAST_SAVED * _RANK * (rows + columns) <= rows * columns


# --- compress ---------------------------------------------------------------------------------------------------------
# Compresses gradients on their way: half precision, low rank, or what measurements say pays.
#
# The difference that a compression makes is measured now and then, with one bucket that is also exchanged as it is.


_FIRST_STEPS = 3  # DDP arranges its buckets in them
_MEASURED_STEPS = 8
_COMPARED_EVERY = 64
_FIRST_COMPARED = 2  # steps after a change of the method


def hook(name: str | None, other: Any, stepping: Stepping) -> Any:
    """A hook for DDP; ``other`` is the script's own."""
    if name is None:
        return other
    if other is not None:
        raise UsageError("there are two ways to compress", hint="give compress or comm_hook, not both")
    name = wished(name)
    if stepping.elastic is not None:
        raise UsageError("an elastic job does not compress gradients", hint="leave out elastic.min_ranks, or compress=")
    return None if name == Method.NONE or stepping.group.ranks == 1 else Compression(name, stepping)


class Compression:
    def __init__(self, name: str, stepping: Stepping) -> None:
        self.__name__ = name
        self._stepping = stepping
        self._is_open = name == AUTO
        self.method = Method.NONE if self._is_open else Method(name)
        self._low_rank = LowRank(stepping.group.ranks)
        self._since = 0  # exchanges with this method
        self._words: list[Sequence[Word]] = []
        self._parameters: list[Any] = []
        self.error: float | None = None
        stepping.compression = self

    # --- DDP's hook ---------------------------------------------------------------------------------------------

    def __call__(self, state: Any, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

        is_last = bucket.is_last()
        if self._is_open:
            self._parameters += bucket.parameters() if len(self._words) == 0 else []
        is_compared = is_last and self.method is not Method.NONE and self._is_due()
        self._since += is_last
        exact = self._exact(bucket) if is_compared else None
        if self.method is Method.POWERSGD:
            found = self._low_rank.reduce(bucket)
        else:
            found = (fp16_compress_hook if self.method is Method.FP16 else allreduce_hook)(None, bucket)
        if exact is not None:
            self._compare(exact, found)
        return found

    def _is_due(self) -> bool:
        return self._since == _FIRST_COMPARED or (self._since > 0 and self._since % _COMPARED_EVERY == 0)

    def _exact(self, bucket: Any) -> Any:
        from torch import distributed

        exact = bucket.buffer().float() / self._stepping.group.ranks
        distributed.all_reduce(exact)
        return exact

    def _compare(self, exact: Any, found: Any) -> None:
        """No thread of the exchange waits here: this is the one that computes gradients."""
        value = found.wait()
        value = value[0] if isinstance(value, list | tuple) else value
        norm = float(exact.norm())
        self.error = float((value.float() - exact).norm()) / norm if norm > 0 else 0.0
        self._record("")

    # --- after a step -------------------------------------------------------------------------------------------

    def observe(self, words: Sequence[Word], *, repeats: bool) -> None:
        """The same words on all ranks."""
        if repeats:  # the exchange had meaningless gradients
            self._low_rank.forget()
        elif self._is_open and all(word.step >= _FIRST_STEPS for word in words):
            self._words.append(words)
            if len(self._words) >= _MEASURED_STEPS:
                self._choose()

    def _choose(self) -> None:
        self._is_open = False
        own_s = median(max(word.own_s for word in words) for words in self._words)
        # The rank that is ready last waits for nobody.
        exchange_s = median(min(word.tail_s for word in words) for words in self._words)
        trained = {id(one): one for one in self._parameters}.values()
        sent = sum(one.numel() * one.element_size() for one in trained)
        ranks = self._stepping.group.ranks
        choice = choose(Measured(ranks, sent, self._low_rank.bytes_of(trained), own_s, exchange_s))
        self.method, self._since = choice.method, 0
        self._words, self._parameters = [], []
        self._record(choice.reason)

    def _record(self, reason: str) -> None:
        self._stepping.balance.put(
            {
                "kind": "compression",
                "step": self._stepping.progress.step,
                "method": str(self.method),
                "reason": reason,
                "error": self.error,
            }
        )


# --- ddp --------------------------------------------------------------------------------------------------------------


_KEPT = ("_forward_hooks", "_forward_pre_hooks", "training")  # of a model that is wrapped again


class Distributed(Way):
    """Torch's DDP, which knows the parameters that were trained when it was made."""

    wrap_again: Any = None

    def change(self, *, has_thawed: bool) -> None:
        if not self.trained():
            raise UsageError("nothing of the model is trained any more: all its layers are frozen")
        # Thawed layers may have begun again, with other values on each rank.
        self.wrap_again(agree=has_thawed)

    def expect_unchanged(self) -> None:
        if not self.is_current():
            raise UsageError(
                "layers were frozen or thawed in the middle of a step", hint="do it between two steps, on all ranks"
            )


def spread(model: Any, stepping: Stepping, options: dict[str, Any]) -> Way:
    """``comm_hook`` is one of torch's; other options go to DDP."""
    group = stepping.group
    model, options = model.to(group.device), dict(options)
    comm_hook = hook(options.pop("compress", None), options.pop("comm_hook", None), stepping)
    return _distributed(model, stepping, comm_hook, options) if group.is_distributed else Way(model, group)


def _distributed(model: Any, stepping: Stepping, comm_hook: Any, options: dict[str, Any]) -> Way:
    """Wraps the model, which is on its device already, such that ``stepping`` sees when its gradients are ready."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    device = stepping.group.device
    devices = [device.index] if device.type == "cuda" else None
    # Sending buffers before every forward would make all ranks wait for the slowest once more.
    buffers = _name_of_buffer_option(DistributedDataParallel)
    frozen.leave_out(model, stepping.group)
    # Gradients in the exchange buffers need no copy: less memory, and less work for the slowest rank.
    defaults = {"device_ids": devices, buffers: False, "gradient_as_bucket_view": True}
    options = {**defaults, **options}
    model = DistributedDataParallel(model, **options)
    reduce, stepping.finite.is_lossy = comm_hook or allreduce_hook, comm_hook is not None
    hook = (None, lambda state, bucket: stepping.bucket(bucket, reduce))
    model.register_comm_hook(*hook)
    way = Distributed(model, stepping.group)

    def rewrap(*, is_static: bool = True, agree: bool = False) -> None:
        # A static graph needs a first step without micro-batches, which those that ran out of memory cannot have.
        stepping.exchanges_apart = bool(options.get("static_graph")) and not is_static
        more = {"static_graph": False, "find_unused_parameters": False} if stepping.exchanges_apart else {}
        _wrap_again(model, {**options, **more}, hook, agree=agree)

    stepping.rewrap = rewrap
    way.wrap_again = lambda *, agree: rewrap(is_static=not stepping.exchanges_apart, agree=agree)
    return way


def _wrap_again(model: Any, options: dict[str, Any], hook: tuple[Any, Any], *, agree: bool) -> None:
    """Keeps the same object, since the script has it: for a group with other members, other layers that are trained, or
    after a step that failed midway.

    Without ``agree`` all ranks have the same parameters, which DDP would send around once more.
    """
    model.reducer = model.logger = None  # its buffers go before there are new ones
    kept = {name: value for name, value in vars(model).items() if name.startswith(_KEPT)}
    has_option = "init_sync" in inspect.signature(type(model)).parameters
    quiet = {"init_sync": False} if has_option and not agree else {}
    frozen.ignore(model.module, frozen.names(model.module))
    type(model).__init__(model, model.module, **{**options, **quiet})
    vars(model).update(kept)
    model.register_comm_hook(*hook)


def _name_of_buffer_option(wrapper: Any) -> str:
    """PyTorch renamed this option, and warns about the old name."""
    new = "forward_sync_buffers"
    return new if new in inspect.signature(wrapper).parameters else "broadcast_buffers"
