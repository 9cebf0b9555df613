"""Small programs for the checker of captures: each breaks one rule, or keeps it. The package's place is this file, as if it were in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SNIPPETS: dict[str, Callable[[], None]] = {}


def snippet(function: Callable[[], None]) -> Callable[[], None]:
    """Add a program to the list."""
    SNIPPETS[function.__name__] = function
    return function


def run(flags: list[str]) -> int:
    """Run the program of a name."""
    SNIPPETS[flags[0]]()
    return 0


def _new(n: int = 1024) -> Tensor:
    import torch

    return torch.zeros(n, device="cuda")


class _Graphs:
    """Graphs of one pool."""

    def __init__(self) -> None:
        import torch

        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    @contextmanager
    def capture(self, mode: str = "thread_local") -> Iterator[Any]:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode=mode):
            yield graph


@snippet
def sound() -> None:
    """Two graphs, one after the other; the second reads what the first has made, and the host its result."""
    import torch

    graphs, x = _Graphs(), _new()
    with graphs.capture() as first:
        y = x + 1
        z = y * y
        del y
    with graphs.capture() as second:
        w = z.sum()
    for _ in range(2):
        x.copy_(torch.ones(1024, pin_memory=True), non_blocking=True)
        first.replay()
        second.replay()
        w.item()


@snippet
def a_stream_that_joins() -> None:
    import torch

    graphs, x, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture() as graph:
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
        y.add_(1)
    graph.replay()
    y.tolist()


def _captured(forbidden: Callable[[Tensor], object]) -> None:
    graphs, x = _Graphs(), _new()
    with graphs.capture():
        y = x + 1
        forbidden(y)


@snippet
def a_host_that_reads() -> None:
    _captured(lambda y: y.sum().item())


@snippet
def a_host_that_lists() -> None:
    _captured(lambda y: y.tolist())


@snippet
def a_host_that_waits() -> None:
    import torch

    _captured(lambda y: torch.cuda.synchronize())


@snippet
def a_stream_that_is_waited_for() -> None:
    import torch

    _captured(lambda y: torch.cuda.current_stream().synchronize())


@snippet
def an_event_that_is_waited_for() -> None:
    import torch

    _captured(lambda y: torch.cuda.current_stream().record_event().synchronize())


@snippet
def an_event_that_is_asked() -> None:
    import torch

    _captured(lambda y: torch.cuda.current_stream().record_event().query())


@snippet
def pinned_memory() -> None:
    import torch

    _captured(lambda y: torch.empty(8, pin_memory=True))


@snippet
def a_copy_from_the_host() -> None:
    import torch

    _captured(lambda y: y.copy_(torch.ones(1024)))


@snippet
def a_copy_from_pinned_memory() -> None:
    import torch

    host = torch.ones(1024, pin_memory=True)
    _captured(lambda y: y.copy_(host, non_blocking=True))


@snippet
def a_mask_as_an_index() -> None:
    _captured(lambda y: y[y > 0])


@snippet
def a_seed() -> None:
    import torch

    _captured(lambda y: torch.cuda.manual_seed(1))


@snippet
def a_state_of_the_generator() -> None:
    import torch

    _captured(lambda y: torch.cuda.get_rng_state())


@snippet
def a_new_communicator() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", rank=0, world_size=2)
    _captured(lambda y: dist.all_reduce(y))


@snippet
def a_collective() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", rank=0, world_size=2)
    graphs, x = _Graphs(), _new()
    dist.all_reduce(x)
    with graphs.capture() as graph:
        y = x + 1
        dist.all_reduce(y, async_op=True).wait()
        y.mul_(2)
    graph.replay()
    y.tolist()


@snippet
def a_collective_under_way() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", rank=0, world_size=2)
    graphs, x = _Graphs(), _new()
    dist.all_reduce(x)
    with graphs.capture():
        dist.all_reduce(x, async_op=True)


@snippet
def work_from_outside() -> None:
    import torch

    graphs, x, side = _Graphs(), _new(), torch.cuda.Stream()
    event = side.record_event()
    with graphs.capture():
        torch.cuda.current_stream().wait_event(event)
        x.add_(1)


@snippet
def a_stream_that_has_not_joined() -> None:
    import torch

    graphs, x, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture():
        y = x + 1
        with torch.cuda.stream(side):
            y.mul_(2)


@snippet
def a_race_inside() -> None:
    import torch

    graphs, x, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture():
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
        y.add_(1)
        torch.cuda.current_stream().wait_stream(side)


@snippet
def memory_freed_inside_too_early() -> None:
    import torch

    graphs, x, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture():
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
        del y
        torch.cuda.current_stream().wait_stream(side)


@snippet
def an_input_that_is_freed() -> None:
    graphs, x = _Graphs(), _new()
    with graphs.capture() as graph:
        y = x + 1
    del x
    graph.replay()
    y.tolist()


@snippet
def an_input_that_is_freed_inside() -> None:
    graphs, x = _Graphs(), _new()
    with graphs.capture():
        x.add_(1)
        del x


@snippet
def a_capture_without_a_replay() -> None:
    graphs, x = _Graphs(), _new()
    with graphs.capture():
        y = x + 1
    y.tolist()


@snippet
def a_result_that_is_read_after_the_next_replay() -> None:
    """The first graph's temporary memory may be where the second one's result is."""
    graphs, x = _Graphs(), _new()
    with graphs.capture() as first:
        y = x + 1
    with graphs.capture() as second:
        z = y + 1
    first.replay()
    second.replay()
    first.replay()
    z.tolist()


@snippet
def a_replay_on_another_stream() -> None:
    """As an evaluation that does not wait for the update."""
    import torch

    graphs, weights, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture() as update:
        weights.mul_(2)
    side.wait_stream(torch.cuda.current_stream())
    update.replay()
    with torch.cuda.stream(side):
        weights.sum()


@snippet
def an_evaluation_that_waits() -> None:
    import torch

    graphs, weights, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture() as update:
        weights.mul_(2)
    update.replay()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.sum()
    torch.cuda.current_stream().wait_stream(side)


@snippet
def a_copy_into_inputs_that_does_not_wait() -> None:
    import torch

    graphs, x, side = _Graphs(), _new(), torch.cuda.Stream()
    with graphs.capture() as graph:
        y = x + 1
    side.wait_stream(torch.cuda.current_stream())
    graph.replay()
    with torch.cuda.stream(side):
        x.copy_(torch.ones(1024, pin_memory=True), non_blocking=True)
    y.tolist()


@snippet
def a_save_that_is_not_waited_for() -> None:
    """The weights are copied by another stream; the update does not wait."""
    import torch

    graphs, weights, side, host = _Graphs(), _new(), torch.cuda.Stream(), torch.empty(1024, pin_memory=True)
    with graphs.capture() as update:
        weights.mul_(2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(weights, non_blocking=True)
    update.replay()


@snippet
def a_host_that_does_not_wait_for_a_replay() -> None:
    import torch

    graphs, x, host = _Graphs(), _new(), torch.empty(1024, pin_memory=True)
    with graphs.capture() as graph:
        y = x + 1
    graph.replay()
    host.copy_(y, non_blocking=True)
    host.tolist()


@snippet
def a_mode_that_other_threads_break() -> None:
    graphs, x = _Graphs(), _new()
    with graphs.capture("global"):
        x.add_(1)
