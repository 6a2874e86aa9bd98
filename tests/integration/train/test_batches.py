"""Real ranks and one alone: batches of many shapes, layers that thaw, all forms of a step, loaders of the script."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rig import ranks

CUT = (
    "steps_first", "steps_first_in_blocks", "steps_first_in_micro_batches", "steps_first_out_of_memory",
    "steps_first_sharded", "steps_first_taken_apart", "tokens", "pictures", "sorted_samples",
)  # fmt: skip
OUT_OF_MEMORY = CUT[3:]
THAWED = ("thaws_in_steps", "thaws_in_blocks", "thaws_with_backward", "thaws_sharded")
ADDED_UP = ("added_up_by_steps", "added_up_by_blocks", "added_up_by_backward")
OTHERS = ("refused", "miscounted", "left_out", "thaws_anew", "thaws_too_late", "forgotten", "backward")
LOCAL = ("local",)  # last: ranks end its last round in different steps
OWN = ("own_loaders", "foreign_loaders", "stateful_loader")
EXACT = 1e-12
SAMPLES = 65
WHOLE_BATCH = "together they are the whole batch"

pytestmark = pytest.mark.timeout(400)

Results = list[dict[str, Any]]


def proof(count: int) -> Any:
    return pytest.param(count, marks=pytest.mark.proof)


@pytest.fixture(scope="module", params=[*map(proof, (1, 2)), 3])
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    count: int = request.param
    names = [*CUT, *THAWED, *ADDED_UP, *OTHERS, *(LOCAL if count > 1 else ())]
    started = ranks.start(["-m", "tests.rig.batches", *names], tmp_path_factory.mktemp("batches"), count)
    started.wait(350)
    return list(started.results())


@pytest.fixture(scope="module", params=[proof(1), 3])
def own(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    started = ranks.start(["-m", "tests.rig.own_loaders", *OWN], tmp_path_factory.mktemp("own"), request.param)
    started.wait(350)
    return list(started.results())


# --- where the samples are --------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_one_process_wherever_the_samples_are(results: Results) -> None:
    for scenario in CUT:
        assert max(result[scenario]["error"] for result in results) < EXACT, scenario
        assert all(result[scenario]["is_once"] for result in results), scenario
    for scenario in OUT_OF_MEMORY:
        assert results[0][scenario]["failures"] > 0, f"{scenario}: the test has not tried what it is about"


def test_batches_that_cannot_be_cut_for_certain_are_refused(results: Results) -> None:
    for result in results:
        said = result["refused"]
        assert all("collate_fn=list" in said[name] for name in ("flat", "packed", "pairs", "counted")), said
        for name in ("turned", "turned in place", "weights of classes", "other values"):
            assert "is not what the loader handed out" in said[name], said
        assert "batch[1]" in said["weights of classes"]
        assert "take batches from run.loader" in said["no loader"]
        assert "samples= needs a batch of run.loader" in said["samples"]


def test_samples_are_counted_right(results: Results) -> None:
    for result in results:
        assert all(WHOLE_BATCH in result["miscounted"][name] for name in ("too many", "too few")), result["miscounted"]
        left_out = result["left_out"]["said"]
        assert left_out == "nothing" if len(results) == 1 else "has left out 1 of" in left_out
        mixed = result["sorted_samples"]
        assert all("weights would be mixed up" in mixed[name] for name in ("weighted", "samples")), mixed


# --- layers that thaw, and one rule for zero_grad -----------------------------------------------------------------


def test_layers_that_thaw_or_freeze_have_the_gradients_of_one_process_from_the_next_step_on(results: Results) -> None:
    for scenario in THAWED:
        assert max(result[scenario]["error"] for result in results) < EXACT, scenario
        assert all(result[scenario]["is_alike"] for result in results), scenario
    assert all(result["thaws_anew"]["is_alike"] for result in results)


def test_layers_that_thaw_in_the_middle_of_a_step_are_an_error_if_ranks_exchange_gradients(results: Results) -> None:
    for result in results:
        said = result["thaws_too_late"]["said"]
        assert said == "nothing" if len(results) == 1 else "in the middle of a step" in said


def test_gradients_add_up_until_they_are_zeroed_in_all_forms(results: Results) -> None:
    for scenario in ADDED_UP:
        assert max(result[scenario]["error"] for result in results) < EXACT, scenario
    assert results[0]["added_up_by_steps"]["failures"] > 0
    for result in results:
        found = result["forgotten"]
        assert (len(found["forgotten"]), found["zeros"], found["none"]) == (1, [], [])


def test_a_step_without_a_block_and_the_loss_of_all_ranks(results: Results) -> None:
    for result in results:
        found = result["backward"]
        assert found["error"] < EXACT
        assert found["loss"] < EXACT
        assert (found["steps"], found["is_clean"], found["is_once"]) == (4, True, True)


def test_local_sgd_cuts_batches_and_knows_layers_that_thaw(results: Results) -> None:
    if len(results) == 1:
        return  # one rank exchanges nothing
    for result in results:
        found = result["local"]
        assert found["error"] < EXACT
        assert found["is_alike"]
        assert "thaw them before an epoch's batches" in found["too late"]
    assert results[0]["local"]["failures"] > 0


# --- loaders of the script's own ------------------------------------------------------------------------------------


def test_a_loader_or_sampler_of_the_script_keeps_its_order(own: Results) -> None:
    found = own[0]["own_loaders"]
    assert all(result["own_loaders"] == found for result in own)
    in_a_row = [list(range(begin, min(begin + 21, SAMPLES))) for begin in range(0, SAMPLES, 21)]
    assert found["in a row"] == found["sequential"] == [in_a_row, in_a_row]
    for name, samples in (("shuffled", 63), ("random", SAMPLES)):
        first, second = ([number for batch in epoch for number in batch] for epoch in found[name])
        assert first != second
        assert all(len(one) == len(set(one)) == samples for one in (first, second)), name
    assert [len(batch) for batch in found["drawn"][0]] == [21, 21, 4], "as many as the sampler draws"
    assert found["drawn"] == found["a sampler"] == found["batches"]
    assert found["drawn"][0] != found["drawn"][1]


def test_what_cannot_be_shared_is_refused_in_words(own: Results) -> None:
    for result in own:
        said = result["foreign_loaders"]
        for name in ("a stream", "a loader of a stream", "a generator"):
            assert "hands out samples in a row" in said.pop(name)
        expected = {
            "no batches": "the DataLoader has no batch_size",
            "own batches": "the DataLoader has a Own",
            "no size": "global_batch=512",
            "batch_size": "global_batch=",
            "batch_sampler": "it takes no batch_sampler",
            "twice": "num_workers: the DataLoader says it already",
            "two orders": "leave out shuffle=",
            "fickle": "returns another order each time",
            "nothing": "global_batch is not a positive number: 0",
        }
        assert set(said) == set(expected)
        assert all(words in said[name] for name, words in expected.items()), said


def test_torchdatas_stateful_loader_is_taken(own: Results) -> None:
    if own[0]["stateful_loader"] is None:
        pytest.skip("torchdata is no dependency of the tests")
    assert all(result["stateful_loader"] == own[0]["own_loaders"]["in a row"] for result in own)
