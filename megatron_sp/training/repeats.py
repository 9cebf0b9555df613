"""Promise of a run's start about the last bit: whether the same processes compute the same numbers again.

On a CPU they do. On a GPU attention's backward pass adds gradients in whatever order its blocks come to an end, unless
--deterministic-mode takes kernels that do not; then what is left is how NCCL sums over ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_sp.config.schema import Config

_PREFIX = "repeats to the last bit: "


def about_repeats(config: Config, device: str, world_size: int, kernel: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the line of the start that says whether the run repeats, and if not why not.

    Args:
        device: cpu or cuda.
        kernel: name of the attention kernel.
        environment: variables of the process.
    """
    again = "a resume with the same processes has the losses and weights of a run without it"
    if device == "cpu":
        return f"{_PREFIX}yes: {again}"
    if not config.kernels.deterministic_mode:
        who = "kernels of a GPU" if kernel == "reference" else f"attention's backward pass ({kernel})"
        return f"{_PREFIX}no: {who} may add in another order each time; --deterministic-mode takes kernels that do not, and is slower"
    if world_size > 1 and config.parallel.distributed_backend != "gloo" and not environment.get("NCCL_ALGO"):
        return f"{_PREFIX}as long as NCCL chooses the same algorithms (NCCL_ALGO=Ring leaves it no choice): the kernels do"
    return f"{_PREFIX}yes, with --deterministic-mode: {again}"
