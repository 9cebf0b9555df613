"""CUDA graphs of one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Launches of a function, which ``replay`` queues again."""

    def replay(self) -> None: ...


class GraphMaker(Protocol):
    """Captures graphs that share a pool."""

    num_bytes: int  # of the pool

    def capture(self, record: Callable[[], None]) -> Graph: ...  # keep what ``record`` launches, which does not run


class CudaGraphs:
    """Maker of CUDA graphs (``GraphMaker``)."""

    def __init__(self, device: torch.device) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._device, self.num_bytes = device, 0
        self._generator = torch.cuda.default_generators[device.index or 0]

    def capture(self, record: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)  # a replay draws by the seed of its step (``TrainStep.seed``)
        # other threads (NCCL's, of a save, of the loader) may do what a capture must not
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(self._device)
            record()
            self.num_bytes += torch.cuda.memory_reserved(self._device) - before
        return graph


def first_words(error: BaseException) -> str:
    """Return the first line of the error that came first."""
    while error.__context__ is not None:  # a failed capture ends with an error of its own
        error = error.__context__
    return f"{type(error).__name__}: {next((line for line in str(error).splitlines() if line.strip()), '')[:300]}"
