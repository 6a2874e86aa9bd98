"""What each device needs in each way to spread a model: which fit, and what is said where none does."""

from __future__ import annotations

import pytest

from ugro.features.planning.model import DeviceNeed, ModelSize, memory_lines
from ugro.features.planning.rules_trials import model_size, needs, that_fit, too_large
from ugro.features.recipes.rules_memory import AROUND_GPU, Device
from ugro.kernel.telemetry.records import ModelRecord, TrialRecord

GB = 10**9
# A billion parameters with AdamW in fp32: 16 GB; 24 blocks, and embeddings.
LARGE = ModelSize(parameters=4 * GB, gradients=4 * GB, optimizer=8 * GB, sample=GB // 10, block=GB // 8, rest=GB)


def gpus(*rooms: float, per_node: int = 1) -> list[Device]:
    return [Device(f"gpu{place // per_node}", "RTX", int(room * GB), is_cpu=False) for place, room in enumerate(rooms)]


def of(way: str, found: list[DeviceNeed]) -> DeviceNeed:
    return next(one for one in found if one.way == way)


def test_one_device_holds_all_of_a_model_and_its_share_of_the_batch() -> None:
    [only] = needs(LARGE, 32, gpus(24), can_accumulate=False)
    assert (only.way, only.samples, only.at_once) == ("ddp", 32, 32)
    assert only.total == 16 * GB + 32 * GB // 10 + AROUND_GPU


def test_fsdp_divides_everything_but_what_is_gathered() -> None:
    found = needs(LARGE, 32, gpus(12, 12, 8, 8), can_accumulate=False)
    one = of("fsdp", found)
    assert one.parameters == GB + GB + 2 * GB // 8  # a fourth, what is in no block, and two blocks
    assert one.gradients == GB + GB // 8
    assert one.optimizer == 2 * GB
    assert that_fit(found) == ["fsdp", "pipeline"]


def test_without_blocks_fsdp_gathers_the_whole_model() -> None:
    size = ModelSize(4 * GB, 4 * GB, 8 * GB, 0, 0, 4 * GB)
    found = needs(size, 4, gpus(8, 8), can_accumulate=True)
    assert of("fsdp", found).parameters == 6 * GB
    assert {one.way for one in found} == {"ddp", "fsdp"}, "there is nothing to split or to put in a row"


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    lora = ModelSize(parameters=4 * GB, gradients=0, optimizer=0, sample=0, block=GB // 8, rest=GB)
    one = of("fsdp", needs(lora, 4, gpus(8, 8), can_accumulate=True))
    assert (one.gradients, one.optimizer) == (0, 0)


def test_tensor_parallel_splits_blocks_among_the_devices_of_a_node() -> None:
    found = needs(LARGE, 32, gpus(12, 12, 12, 12, per_node=2), can_accumulate=False)
    one = of("tp+dp", found)
    own = 3 * GB / 2 + GB  # half of all blocks, and what is in none
    assert one.parameters == own + own / 2
    assert one.samples == 16, "the two devices of a node compute the same samples"


@pytest.mark.parametrize("devices", [gpus(12, 12, 12), gpus(12, 12, 12, per_node=2)])
def test_tensor_parallel_needs_several_devices_on_every_node_and_equally_many(devices: list[Device]) -> None:
    assert "tp+dp" not in {one.way for one in needs(LARGE, 32, devices, can_accumulate=True)}


def test_a_pipeline_fills_devices_in_proportion_to_their_room() -> None:
    found = [one for one in needs(LARGE, 8, gpus(16, 8), can_accumulate=False) if one.way == "pipeline"]
    assert found[0].parameters == pytest.approx(2 * found[1].parameters)
    assert sum(one.parameters + one.gradients + one.optimizer for one in found) == pytest.approx(16 * GB, abs=10)


def test_a_share_that_does_not_fit_at_once_fits_in_parts_if_the_script_can_do_that() -> None:
    size = ModelSize(GB, GB, 2 * GB, GB, GB // 10, 0)
    [whole] = needs(size, 8, gpus(8), can_accumulate=False)
    [parts] = needs(size, 8, gpus(8), can_accumulate=True)
    assert (whole.at_once, parts.at_once) == (0, 3)
    assert "3 of 8 samples at once" in memory_lines([parts])[0]
    assert "does not fit" in memory_lines([whole])[0]


def test_the_line_of_a_way_is_about_the_device_with_the_least_to_spare() -> None:
    lines = memory_lines(needs(LARGE, 32, gpus(24, 6), can_accumulate=True))
    assert [line.split()[0] for line in lines] == ["ddp", "fsdp", "pipeline"]
    assert lines[0].startswith("ddp      does not fit: gpu1 (RTX) needs about ")
    assert "of 5.6 GiB" in lines[0]


def test_a_training_that_ran_out_of_memory_hears_in_which_ways_it_could_fit() -> None:
    words = too_large(LARGE, gpus(12, 12, 12))
    assert words.startswith("parameters, gradients and optimizer need 14.9 GiB on each device")
    assert words.endswith("spread over 3 devices they fit: parallel='fsdp' or 'pipeline'")
    assert "parallel" not in too_large(LARGE, gpus(1, 1)), "nothing helps"


def test_the_size_of_a_model_is_read_from_what_a_trial_records() -> None:
    model = ModelRecord(400, False, 100, "ddp", 400, 30, 40)
    assert model_size(ModelRecord(400, False, 100), None) is None, "it has no parameters"
    assert model_size(model, None) == ModelSize(400, 400, 800, 0, 30, 40), "moments as AdamW has them"
    trial = TrialRecord(optimizer_bytes=400, sample_bytes=7)
    assert model_size(model, trial) == ModelSize(400, 400, 400, 7, 30, 40)
