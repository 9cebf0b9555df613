"""The numbers of a whole sequence's positions, as a model of transformers would work them out if it saw all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def global_positions(model: nn.Module, first: Tensor, mask: Tensor | None) -> Tensor:
    """Of every position.

    Args:
        model: its family decides: most count from 0, RoBERTa's from behind its padding id and past padding, OPT past what is masked.
        first: input_ids [b, s], or inputs_embeds [b, s, h].
        mask: padding [b, s], 0 where there is none to attend to, or None.
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
