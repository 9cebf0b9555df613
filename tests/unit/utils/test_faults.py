"""The plan of injected faults: what it reads, and what it refuses."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from megatron_sp.utils import faults
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.faults import FAULT_VARIABLE, FaultPlan

Plan = Callable[..., FaultPlan]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    def read(text: str, rank: int = 0, attempt: int = 0) -> FaultPlan:
        monkeypatch.setenv(FAULT_VARIABLE, text)
        return FaultPlan.from_env(True, rank, attempt)

    return read


def test_a_fault_is_of_its_place_step_rank_and_attempt(plan: Plan) -> None:
    text = "full:rank=1:at=pipeline.B1.2:step=7:attempt=0;nan:at=loss"
    assert len(plan(text, 1).faults) == 2 and len(plan(text, 0).faults) == len(plan(text, 1, 1).faults) == 1
    found = plan(text, 1)
    for point, step in (("pipeline.B1.2", 6), ("pipeline.B1.1", 7), ("pipeline.B1.2.1", 7), ("loss", 7)):
        found.at(point, step)
    with pytest.raises(OSError) as error:
        found.at("pipeline.B1.2", 7)
    assert error.value.errno == errno.ENOSPC
    assert found.poisons("loss", 1) and not found.poisons("grad", 1)


def test_a_hang_goes_no_further(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = list[bool]()
    monkeypatch.setattr(faults, "_hang", lambda: hung.append(True))
    found = plan("hang:at=pipeline.F0.0.3")
    found.at("pipeline.F0.0", 1)
    assert not hung
    found.at("pipeline.F0.0.3", 1)
    assert hung


@pytest.mark.parametrize(
    "text",
    ["kill", "kill:at=pipeline.B1", "kill:at=pipeline.X1.2", "kill:at=pipeline.B1.2.3.4", "kill:at=pipeline.B1.2x", "kill:at=B1.2",
     "kill:at=pipeline.B1:2", "hand:at=loss", "kill:at=loss:rank=one", "kill:at=loss:who=1"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(text: str, plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*hang.*step\.forward.*pipeline\.B1\.2 \(stage 1"):
        plan(text)
