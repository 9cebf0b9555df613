"""Position ids of a whole sequence, as a transformers model would compute them if it saw all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def global_positions(model: nn.Module, first: Tensor, mask: Tensor | None) -> Tensor:
    """Return the position ids of a whole sequence.

    Args:
        model: its family decides: most count from 0, RoBERTa from its padding id + 1 and past padding, OPT past masked
            positions.
        first: input_ids [b, s], or inputs_embeds [b, s, h].
        mask: padding mask [b, s], 0 where nothing is to be attended to, or None.
    Returns:
        int64 [1 or b, s].
    """
    counter: Any = next((m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")), None)
    if counter is not None and first.ndim == 2:
        made: Tensor = counter.create_position_ids_from_input_ids(first, counter.padding_idx)
        return made
    if getattr(getattr(model, "config", None), "model_type", "") == "opt" and mask is not None and mask.ndim == 2:
        return mask.long().cumsum(1) * mask.long() - 1
    return torch.arange(first.shape[1], device=first.device)[None]
