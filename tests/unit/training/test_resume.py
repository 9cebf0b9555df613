"""Checks of a resumed run: its learning-rate schedule and its training data must be those of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from megatron_sp.comm.groups import Group
from megatron_sp.config.schema import Config, OptimizerConfig
from megatron_sp.data.build import Datasets
from megatron_sp.data.dataset import sample_digest
from megatron_sp.data.gpt_dataset import GPTOptions, MockGPTDataset
from megatron_sp.data.tokenizers import NullTokenizer
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.training.resume import resume_samples, resume_schedule
from megatron_sp.training.train_state import SampleHistory
from megatron_sp.utils.errors import CheckpointError, ConfigError, DataError

SCHEDULE = LRSchedule(0.1, 0.01, 0.0, 3.4, 100, "cosine", "exponential", 0, 0.1, 0.1, "constant", 100)
ONE_PROCESS = cast("Group", None)  # the calls that collect JSON then stay in this process


def flags(**given: bool) -> OptimizerConfig:
    return replace(OptimizerConfig(), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", [{}, {"schedule": None}, {"schedule": SCHEDULE.state()}])
def test_the_same_schedule_or_none_goes_on(stored: dict[str, Any]) -> None:
    """A converted checkpoint has no schedule of ours."""
    assert resume_schedule(stored, flags(), SCHEDULE) == SCHEDULE


def test_another_schedule_must_be_chosen_by_a_flag() -> None:
    stored = {"schedule": {**SCHEDULE.state(), "peak": 0.2, "horizon": 90}}
    with pytest.raises(ConfigError) as found:
        resume_schedule(stored, flags(), SCHEDULE)
    rows = [line for line in str(found.value).splitlines() if line.startswith("  ")]
    assert rows == ["  peak: 0.2 in the checkpoint, 0.1 here", "  horizon: 90 in the checkpoint, 100 here"]
    assert resume_schedule(stored, flags(override_opt_param_scheduler=True), SCHEDULE) == SCHEDULE
    old = resume_schedule(stored, flags(use_checkpoint_opt_param_scheduler=True), SCHEDULE)
    assert old == replace(SCHEDULE, peak=0.2, horizon=90)


def test_a_rate_of_its_own_for_embeddings_is_part_of_the_schedule() -> None:
    own = replace(SCHEDULE, decoupled_peak=0.3)
    assert "decoupled_peak" not in SCHEDULE.state() and resume_schedule({"schedule": own.state()}, flags(), own) == own
    with pytest.raises(ConfigError, match=r"decoupled_peak: 0\.3 in the checkpoint, None here"):
        resume_schedule({"schedule": own.state()}, flags(), SCHEDULE)
    with pytest.raises(ConfigError, match=r"decoupled_peak: None in the checkpoint, 0\.3 here"):
        resume_schedule({"schedule": SCHEDULE.state()}, flags(), own)


def test_a_warm_up_that_an_older_version_rounded_stays_rounded() -> None:
    stored = {"schedule": {**SCHEDULE.state(), "warmup": 3}}
    assert resume_schedule(stored, flags(), SCHEDULE) == replace(SCHEDULE, warmup=3)
    with pytest.raises(ConfigError, match="warmup: 4 in the checkpoint"):
        resume_schedule({"schedule": {**SCHEDULE.state(), "warmup": 4}}, flags(), SCHEDULE)


@pytest.mark.parametrize("stored", [{"peak": 1.0}, {**SCHEDULE.state(), "colour": "blue"}])
def test_a_stored_schedule_that_cannot_be_read(stored: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be read; use --override-opt-param-scheduler"):
        resume_schedule({"schedule": stored}, flags(use_checkpoint_opt_param_scheduler=True), SCHEDULE)
    with pytest.raises(ConfigError):
        resume_schedule({"schedule": "damaged"}, flags(), SCHEDULE)


# Data


def make_data(seed: int = 1, train: bool = True) -> Datasets:
    def make(number: int) -> MockGPTDataset:
        return MockGPTDataset(GPTOptions(seq_length=8, seed=seed + number), num_samples=12, tokenizer=NullTokenizer(60))

    return Datasets(make(0) if train else None, make(100), None)


def state_of(data: Datasets, steps: int = 2) -> dict[str, Any]:
    """What a checkpoint says of its data: two steps of four samples each."""
    assert data.train is not None
    history = SampleHistory()
    for step in range(steps):
        history.add(step + 1, 4 * step, [sample_digest(data.train[i]) for i in range(4 * step, 4 * step + 4)])
    return {
        "data_fingerprint": data.fingerprint, "evaluation_data": data.evaluation_fingerprints, "samples": history.to_json(),
    }  # fmt: skip


def check(stored: dict[str, Any], data: Datasets, *, accept: bool = False) -> tuple[SampleHistory, list[str]]:
    config, said = Config(), list[str]()
    config.checkpoint.accept_data_change = accept
    return resume_samples(stored, data, config, ONE_PROCESS, said.append), said


def test_the_same_data_go_on_with_the_history_of_their_samples() -> None:
    data = make_data()
    stored = state_of(data)
    history, said = check(stored, data)
    assert history.to_json() == stored["samples"] and len(history) == 8 and said == []


def test_other_data_are_refused_unless_that_is_meant() -> None:
    stored, now = state_of(make_data(1)), make_data(2)
    with pytest.raises(DataError) as found:
        check(stored, now)
    message = str(found.value)
    assert stored["data_fingerprint"] in message and now.fingerprint in message and "sample 0 (number 0 of step 1)" in message
    history, said = check(stored, now, accept=True)
    assert len(history) == 0 and said[0].startswith("note: the validation data have changed")
    assert said[1].startswith("--accept-data-change: the training data is not what")


def test_samples_are_compared_even_if_the_fingerprint_is_the_same() -> None:
    """The fingerprint is of sizes and a few probes."""
    data = make_data()
    stored = state_of(data)
    stored["samples"] = state_of(make_data(5))["samples"]
    with pytest.raises(DataError, match=r"the 8 samples of steps 1 to 2 were read again, and the first that differs is sample 0"):
        check(stored, data)


def test_a_checkpoint_of_an_older_version_has_a_fingerprint_only() -> None:
    data = make_data()
    stored = {name: value for name, value in state_of(data).items() if name != "samples"}
    history, said = check(stored, data)
    assert len(history) == 0 and "older version and has no digests" in said[0]
    with pytest.raises(DataError, match="fingerprint"):
        check({**stored, "data_fingerprint": "x"}, data)


def test_nothing_is_known_of_a_converted_checkpoint_and_nothing_is_checked_without_training() -> None:
    assert check({}, make_data())[1] == []
    assert check(state_of(make_data(1)), make_data(1, train=False))[1] == []


def test_a_damaged_history_is_an_error_of_the_checkpoint() -> None:
    data = make_data()
    with pytest.raises(CheckpointError, match="samples"):
        check({**state_of(data), "samples": "damaged"}, data)
