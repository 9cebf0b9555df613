"""Counters in an optimizer's state: updates, progress of the schedule, loss scale of fp16.

Source: megatron-core 0.16.1, optimizer/grad_scaler.py; deepspeed 0.19.8, runtime/fp16/loss_scaler.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import PrecisionConfig
from megatron_sp.convert.archive.torch_files import Object, TensorRecord
from megatron_sp.convert.model import LossScale, Model

# Updates are fewer than the steps of the training where steps were skipped. The loss scale is as in our checkpoints;
# good_steps counts the steps since the last overflow.
#
#     ours                 Megatron-LM (grad_scaler)    DeepSpeed (loss_scaler, an object)
#     scale                scale                        cur_scale
#     good_steps           growth_tracker               cur_iter - last_overflow_iter - 1
#     hysteresis_left      hysteresis_tracker           cur_hysteresis
_DYNAMIC = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"


def single(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, TensorRecord) and math.prod(value.shape) == 1:
        value = value.read()
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if is_number and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """Return a count, or None."""
    number = single(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def of_megatron(tree: Mapping[Any, Any]) -> tuple[int | None, LossScale | None]:
    """Return updates and loss scale of a saved state."""
    outer = tree.get("optimizer")
    if not isinstance(outer, dict):
        return None, None
    inside = (outer[key] for key in ("optimizer", "optimizer_state_dict") if isinstance(outer.get(key), dict))
    adam, scaler = next(inside, outer), outer.get("grad_scaler")
    by_number, groups = adam.get("state"), adam.get("param_groups")
    by_number = by_number if isinstance(by_number, dict) else {}
    first = next((state for state in by_number.values() if isinstance(state, dict)), {})
    settings = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    # the number of updates is beside the moments, common to all, or in the groups
    places = (first.get("step"), by_number.get("common_step"), *(group.get("step") for group in settings[:1]))
    updates = next((count for place in places if (count := whole(place)) is not None), None)
    if not isinstance(scaler, dict):
        return updates, None
    counts = (whole(scaler.get(name)) for name in ("growth_tracker", "hysteresis_tracker"))
    return updates, _scale(single(scaler.get("scale")), *counts)


def scheduled_of(tree: Mapping[Any, Any], consumed: int) -> int | None:
    """Return the samples of the learning rate schedule, or None."""
    states = (tree[key] for key in ("opt_param_scheduler", "lr_scheduler") if isinstance(tree.get(key), dict))
    state: Mapping[Any, Any] = next(states, {})
    samples = next((n for key in ("num_steps", "num_iters") if (n := whole(state.get(key))) is not None), None)
    return samples if samples is not None and samples <= consumed else None


def scale_of_deepspeed(scaler: Any) -> LossScale | None:
    """Return a dynamic loss scale, or None."""
    if not isinstance(scaler, Object) or scaler.name.rpartition(".")[2] != "DynamicLossScaler":
        return None
    attributes = scaler.attributes
    now, last = (attributes.get(name) for name in ("cur_iter", "last_overflow_iter"))
    good = now - last - 1 if isinstance(now, int) and isinstance(last, int) else None
    return _scale(single(attributes.get("cur_scale")), whole(good), whole(attributes.get("cur_hysteresis")))


def _scale(scale: float | None, good_steps: int | None, hysteresis_left: int | None) -> LossScale | None:
    if scale is None or scale <= 0 or good_steps is None:
        return None
    left = 1 if hysteresis_left is None else hysteresis_left
    return {"dynamic": True, "scale": float(scale), "good_steps": good_steps, "hysteresis_left": left}


def megatron_scaler(model: Model, precision: PrecisionConfig) -> dict[str, Any]:
    """Return the entry ``grad_scaler``, if any."""
    scale = model.loss_scale
    if scale is None:
        return {}
    good_steps, left = int(scale["good_steps"]) % precision.loss_scale_window, int(scale["hysteresis_left"])
    tensor = torch.tensor([scale["scale"]])
    return {"grad_scaler": {"scale": tensor, "growth_tracker": good_steps, "hysteresis_tracker": left}}


def deepspeed_scaler(model: Model, precision: PrecisionConfig) -> dict[str, Any]:
    """Return the entries ``dynamic_loss_scale`` and ``loss_scaler``, if any."""
    scale = model.loss_scale
    if scale is None:
        return {"dynamic_loss_scale": False}
    state = {
        "cur_scale": scale["scale"], "cur_iter": model.step,
        "last_overflow_iter": model.step - int(scale["good_steps"]) - 1, "scale_factor": 2.0,
        "scale_window": precision.loss_scale_window, "min_scale": precision.min_loss_scale,
        "delayed_shift": precision.hysteresis, "cur_hysteresis": max(1, int(scale["hysteresis_left"])),
        "consecutive_hysteresis": False, "raise_error_at_min_scale": True, "dtype": torch.float16, "dynamic": True,
    }  # fmt: skip
    return {"dynamic_loss_scale": True, "loss_scaler": Object(_DYNAMIC, state=state)}
