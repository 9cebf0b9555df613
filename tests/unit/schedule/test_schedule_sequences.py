"""What an attention takes for the whole sequence."""

from __future__ import annotations

import pytest
import torch

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.schedule.apply.sequences import Cut, Heads
from megatron_sp.utils.errors import ConfigError


def test_a_recomputation_behind_a_pass_of_another_length_is_refused() -> None:
    """Its exchanges would take the other pass's length, and drop positions without a word."""
    heads, shorter = Heads(SINGLE_RANK, 2, 1, "attention"), Cut(5, 6, 1, 0)
    assert heads.enter(torch.zeros(1, 2, 6, 4), shorter).shape == (1, 2, 5, 4)
    with pytest.raises(ConfigError, match="attention computes 8 positions, but the last forward pass had 6"):
        heads.enter(torch.zeros(1, 2, 8, 4), shorter)
