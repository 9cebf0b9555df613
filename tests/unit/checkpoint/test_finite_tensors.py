"""What a look at a tensor finds: NaN, infinities, numbers that another dtype cannot hold."""

from __future__ import annotations

import pytest
import torch

from megatron_sp.checkpoint.stream import FiniteTensors
from megatron_sp.utils.errors import CheckpointError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("numbers", "written", "message"), [
    ([1.0, NAN, NAN], torch.float32, "w has 2 NaN of 3 numbers: nothing can be trained"),
    ([-INF, 0.0], torch.float32, "w has 1 infinite of 2 numbers: "),
    ([INF, NAN], torch.bfloat16, "w has 1 NaN and 1 infinite of 2 numbers: "),
    ([7e4, -1e5, 1.0], torch.float16, r"w has 2 of 3 numbers that are too large for float16 \(up to 1e\+05\).*another --dtype; "),
])  # fmt: skip
def test_what_is_refused(numbers: list[float], written: torch.dtype, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FiniteTensors(allow=False).look("w", torch.tensor(numbers), written)
    allowed = FiniteTensors(allow=True)
    allowed.look("w", torch.tensor(numbers), written)
    assert len(allowed.notes()) == 1 and message.startswith(allowed.notes()[0][:20])


@pytest.mark.parametrize(("numbers", "written"), [
    (torch.tensor([65510.0, -3.4e38]), torch.float32), (torch.tensor([65510.0]), torch.float16),  # is rounded to the largest
    (torch.tensor([7e4]), torch.bfloat16), (torch.empty(0), torch.float16), (torch.tensor([1 << 40]), torch.int64),
    (torch.tensor(1.0), torch.float16), (torch.ones(2).to(torch.float8_e4m3fn), torch.float8_e4m3fn),
])  # fmt: skip
def test_what_passes(numbers: torch.Tensor, written: torch.dtype) -> None:
    looks = FiniteTensors(allow=False)
    assert looks.look("w", numbers, written) is numbers and looks.notes() == []


def test_of_many_tensors_the_first_are_named() -> None:
    looks = FiniteTensors(allow=True)
    for number in range(11):
        looks.look(f"w{number}", torch.tensor([NAN]), torch.float32)
    assert len(looks.notes()) == 9 and looks.notes()[-1] == "3 more tensors have numbers that are not finite"
