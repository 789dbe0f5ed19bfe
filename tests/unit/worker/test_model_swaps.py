"""Which model a worker with a list serves next."""

from __future__ import annotations

import pytest

from shared.transport.ports.offers import WaitingModel
from worker.model_swaps import next_model
from worker.settings import DEMO_MODEL_NAME, WorkerSettings, listed_models

BOUND_MS = 30_000
SWAP_MS = 2_000


def of(model: str, oldest_ms: int, num_waiting: int = 1, **more: object) -> WaitingModel:
    return WaitingModel(model, num_waiting, oldest_ms, **more)  # type: ignore[arg-type]


def following(
    *queues: WaitingModel, is_idle: bool = False, not_now: tuple[str, ...] = ()
) -> str | None:
    found = next_model(
        "own",
        queues,
        is_idle=is_idle,
        bound_ms=BOUND_MS,
        swap_ms=SWAP_MS,
        not_now=not_now,
    )
    return None if found is None else found.model


def test_a_busy_worker_stays_until_another_model_has_waited_for_the_bound() -> None:
    assert following(of("own", 90_000), of("a", BOUND_MS - 1)) is None
    assert following(of("own", 90_000), of("a", BOUND_MS)) == "a"


def test_a_worker_without_queued_jobs_stays_while_its_own_run() -> None:
    assert following(of("own", 0, 0), of("a", BOUND_MS - 1)) is None


def test_an_idle_worker_leaves_at_once_for_a_model_that_waits() -> None:
    assert following(of("own", 0, 0), of("a", 1), is_idle=True) == "a"
    assert following(of("own", 10), of("a", 1), is_idle=True) is None, "its own jobs wait"


def test_nothing_waits_and_nothing_changes() -> None:
    assert following(of("own", 0, 0), of("a", 0, 0), is_idle=True) is None
    assert following(is_idle=True) is None


def test_the_longest_wait_goes_first_and_the_order_of_the_list_decides_a_tie() -> None:
    assert following(of("a", 31_000), of("own", 0), of("b", 32_000)) == "b"
    assert following(of("a", 31_000), of("b", 31_000)) == "a"


def test_with_several_that_wait_the_first_goes_a_swap_earlier_for_each_further_one() -> None:
    early_ms = BOUND_MS - 2 * SWAP_MS
    queues = [of("a", early_ms), of("b", early_ms - 1), of("c", early_ms - 2)]
    assert following(*queues) == "a"
    assert following(*queues[:2]) is None, "fewer swaps are ahead"
    # "a" is served now: "b" is the last, and not yet due.
    assert following(of("b", BOUND_MS - 1)) is None


def test_a_model_that_waits_becomes_due_however_busy_the_own_one_is() -> None:
    waits_ms = range(0, 2 * BOUND_MS, 500)
    left = [ms for ms in waits_ms if following(of("own", ms, 1000), of("a", ms)) == "a"]
    assert left[0] == BOUND_MS


def test_a_model_that_another_worker_has_claimed_is_left_to_it() -> None:
    assert following(of("a", 90_000, is_claimed=True), of("b", 40_000)) == "b"


def test_a_served_model_is_helped_by_an_idle_worker_alone() -> None:
    served = of("a", BOUND_MS, num_workers=1)
    assert following(of("own", 0, 0), served) is None
    assert following(of("own", 0, 0), served, is_idle=True) == "a"
    short = of("a", BOUND_MS - 1, num_workers=1)
    assert following(of("own", 0, 0), short, is_idle=True) is None


def test_a_model_that_failed_to_load_is_left_out_for_now() -> None:
    assert following(of("a", 90_000), of("b", 40_000), not_now=("a",)) == "b"


def test_models_are_listed_by_name_or_by_themselves() -> None:
    found = listed_models("small=/models/a, org/model@main, ./x=y/z")
    assert found == {"small": "/models/a", "org/model": "org/model@main", "z": "./x=y/z"}


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ("a=/x,a=/y", "'a' names two models"),
        ("a=", "'a=' is neither a model nor a name"),
        ("a b=/x", "'a b=/x' is neither"),
        (",".join(f"m{n}=/x" for n in range(65)), "65 models are more than 64"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_with_a_sentence(models: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WorkerSettings(redis_url="unix:///unused", models=models)


def test_a_list_and_a_directory_for_kv_blocks_exclude_each_other() -> None:
    """The models would delete each other's."""
    with pytest.raises(ValueError, match="PENSTOCK_KV_OFFLOADING_DIR is not for PENSTOCK_MODELS"):
        WorkerSettings(
            redis_url="unix:///unused", models="a=/x", kv_offloading_gb=1, kv_offloading_dir="/kv"
        )
    WorkerSettings(redis_url="unix:///unused", models="a=/x", kv_offloading_gb=1)


def test_a_list_and_a_single_model_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="PENSTOCK_MODELS and PENSTOCK_MODEL"):
        WorkerSettings(redis_url="unix:///unused", models="a=/x", model="/y")
    with pytest.raises(ValueError, match="PENSTOCK_ENGINE=http"):
        WorkerSettings(
            redis_url="unix:///unused",
            models="a=/x",
            engine="http",
            upstream_urls="http://127.0.0.1:1",
        )


def test_without_a_list_there_is_one_model() -> None:
    assert WorkerSettings(redis_url="unix:///unused").named_models == {DEMO_MODEL_NAME: ""}
