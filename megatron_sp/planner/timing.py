"""Time of a step: computation, communication, and the overlap of the two.

    step = micro-batches * (forward + backward + recomputation) / sustained + exposed communication + update
           + overlap_cost * hidden communication + exposed copies to host memory, or Python if that takes longer,
           + bubble of a pipeline

``overlap_cost`` is the share of a GPU's multiprocessors that NCCL takes for a collective. With --nccl-sp-ctas and
--nccl-dp-ctas it takes no more than those, and moves no more than their share of what the link between GPUs carries.

``sustained`` is the share of its kernels' rates that a run achieves (``estimate/hardware.py``).

``estimate/traffic.py`` determines which bytes *can* be hidden. The computation that can hide them:

    tensor parallel           the products of the backward pass for gradients of weights
    Ulysses, split-qkv        two thirds of the q, k, v products; in backward also the output projection's weight gradient
    Ulysses, chunked in G     (G-1)/G of attention and its projections
    --delay-wgrad             beside that, in backward, gradients of the MLP's weights (with tp > 1 of fc2's)
    experts                   with --moe-chunks C, (C-1)/C of the rows under the products of the blocks' MLPs and experts of that direction,
                              half for rows, half for results; with a shared expert also the first rows
    context parallel          attention, forward and backward, less what hides Ulysses' exchanges on the same link
    gradients (ZeRO 0, 1)     one micro-batch's backward pass; (ZeRO 2, 3) all of them
    copies to the host        the blocks' forward passes (--offload-activations); copies back: their backward passes
    parameters (ZeRO 1, 2)    one micro-batch's forward pass; (ZeRO 3) half under the forward, half under the backward passes

Gradients and parameters come after the others on the same link: the time that those use the link is subtracted.

Python runs ahead of a GPU, so a step takes as long as the slower of the two. Its time does not depend on the size of
anything: ``host_ms`` for each layer of a micro-batch, as much again for embedding, head and update together, a third of it for a
forward pass that is repeated, and ``_EXCHANGE`` of it for each of Ulysses' exchanges. What other exchanges take is not known. Steps
that can be captured (--cuda-graphs) are launched without Python: their time is the GPU's.

Of a pipeline the rank is one that computes longest. Its bubble is what the replay of the schedule takes beyond that, with the times of all
stages' passes and of messages between them; of a long step the first rounds are replayed, and the rest is as busy as that rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_sp.config.rules_graphs import obstacles
from megatron_sp.config.schema import Config
from megatron_sp.estimate.memory_rank import RankForm, forms_of_ranks
from megatron_sp.estimate.stages import enough_micro_batches, layers_of_stages, pipeline_plan
from megatron_sp.estimate.traffic import Flow, traffic_plan
from megatron_sp.estimate.workload import Workload, workload_of
from megatron_sp.parallel.pipeline_plan import Action
from megatron_sp.parallel.pipeline_replay import replay
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.work import Pass, Work

_EXCHANGE = 0.043
"""Measured with 4, 8 and 16 exchanges in a layer: 0.26 ms each, where a layer without takes 6.0."""


@dataclass(frozen=True)
class Exchange:
    """One kind of communication of a step.

    Attributes:
        link: name of the link.
        seconds: time without overlap.
        hidden: part of it that is hidden under computation.
    """

    flow: Flow
    link: str
    seconds: float
    hidden: float

    @property
    def exposed(self) -> float:
        """Time that is not hidden under computation."""
        return self.seconds - self.hidden


@dataclass(frozen=True)
class StepTime:
    """Time of one step on one rank in seconds, by cause.

    Attributes:
        products, attention, memory: computation, recomputation included.
        recompute: part of these that is recomputation.
        update: gradient norm and optimizer.
        python: time that Python takes to launch all of it.
        overlap: slowdown of computation by communication that it hides.
        copies: exposed copies of activations to host memory and back.
        exchanges: communication by kind.
        bubble: time that a pipeline's busiest rank waits for others.
    """

    products: float
    attention: float
    memory: float
    recompute: float
    update: float
    python: float
    overlap: float
    copies: float
    exchanges: tuple[Exchange, ...]
    bubble: float = 0.0

    @property
    def exposed(self) -> float:
        """Time of all exchanges that is not hidden."""
        return sum(exchange.exposed for exchange in self.exchanges)

    @property
    def host(self) -> float:
        """Time that the GPU waits for Python."""
        return max(0.0, self.python - self._of_gpu)

    @property
    def _of_gpu(self) -> float:
        computed = self.products + self.attention + self.memory + self.update
        return computed + self.overlap + self.copies + self.exposed

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self._of_gpu + self.host + self.bubble

    @property
    def bound(self) -> str:
        """Text with the cause that takes most of the time."""
        parts = {
            "matrix products": self.products, "attention": self.attention, "memory bandwidth": self.memory + self.update,
            "Python and launches": self.host, "copies to host memory": self.copies, "communication": self.exposed + self.overlap,
            "bubble of the pipeline": self.bubble,
        }  # fmt: skip
        name = max(parts, key=lambda part: parts[part])
        if name == "communication":
            worst = max(self.exchanges, key=lambda exchange: exchange.exposed)
            name = f"{worst.link}: {worst.flow.kind}"
        return f"{name} {parts[name] if name in parts else self.exposed + self.overlap:.3g} s"


def step_time(config: Config, machine: Machine) -> StepTime:
    """Predict a step of a validated configuration on a machine."""
    workload = workload_of(config, machine.gpus, "cpu" if machine.is_cpu else "cuda")
    is_captured = config.kernels.cuda_graphs != "off" and not obstacles(config)
    clocks = [_Clock(machine, form, Work(form, machine.gpu), is_captured) for form in forms_of_ranks(workload)]
    busiest = max(clocks, key=lambda clock: clock.micro_batch)
    found = busiest.step(traffic_plan(workload).flows)
    if workload.parallel.pipeline_model_parallel_size == 1:
        return found
    return replace(found, bubble=_bubble(workload, busiest))


def _bubble(workload: Workload, clock: _Clock) -> float:
    """Return the seconds of a step that the busiest rank of a pipeline waits."""
    parallel, machine, shape = workload.parallel, clock.machine, clock.form.shape
    count, p = shape.num_micro_batches, parallel.pipeline_model_parallel_size
    plan = pipeline_plan(workload.model, workload.kernels, parallel, enough_micro_batches(parallel, count))
    layers, each = layers_of_stages(workload.model, parallel), 1 / plan.num_slices
    weights = clock.backward.weight_products
    passes = {"F": clock.forward.seconds, "B": clock.backward.seconds + clock.again.seconds - weights, "W": weights}
    message = machine.seconds("send", "pp", p, shape.tp, 1, shape.stream * each)

    def seconds(action: Action) -> float:
        of_head = clock.ends.seconds if action.kind == "B" and action.stage == plan.num_stages - 1 else 0.0
        return (layers[action.stage] * passes[action.kind] + of_head) * each

    played = replay(plan, seconds, lambda action: message)
    return max(0.0, played.time - max(played.busy))


def _is_of_replicas(flow: Flow) -> bool:
    """Return whether a flow is between the ranks that have the same parameters: dp x cp x sp."""
    return flow.group.startswith("dp")


def _is_inside(flow: Flow) -> bool:
    """Return whether a flow is of the layers' activations, except those over cp."""
    return flow.group in ("tp", "sp", "sequence") or flow.group.startswith("ep")


class _Clock:
    def __init__(self, machine: Machine, form: RankForm, work: Work, is_captured: bool) -> None:
        self.parallel, self.machine, self.form, self.work = form.workload.parallel, machine, form, work
        self.is_captured = is_captured
        self.layers, self.count = form.shape.layers, form.shape.num_micro_batches
        again = sum(last - first for first, last in form.shape.recomputed) / self.layers
        slower = 1 / machine.gpu.sustained
        self.forward, self.backward = work.block_forward().times(slower), work.block_backward().times(slower)
        self.again = work.recomputed(form.workload.kernels.recompute_granularity, again).times(slower)
        self.ends = work.ends().times(slower if form.shape.share.has_head else 0.0)
        self.repeats = again  # forward passes of a block beyond the first

    @property
    def micro_batch(self) -> float:
        """Seconds of computation of a micro-batch."""
        return ((self.forward + self.backward + self.again).times(self.layers) + self.ends).seconds

    def step(self, flows: Iterable[Flow]) -> StepTime:
        passes = (self.forward + self.backward + self.again).times(self.layers) + self.ends
        computed = passes.times(self.count)
        exchanges = tuple(self._exchanges(list(flows)))
        slowed = sum(exchange.hidden * self._cost(exchange.flow) for exchange in exchanges)
        return StepTime(
            computed.products, computed.attention, computed.memory + self.work.gradients(), self.again.seconds * self.layers * self.count,
            self.work.update(), self._python(), slowed, self._copies(), exchanges,
        )  # fmt: skip

    def _ctas(self, flow: Flow) -> float:
        """Return the multiprocessors that a collective takes, of those that NCCL takes by itself, as a share."""
        gpu, parallel = self.machine.gpu, self.parallel
        most = (
            parallel.nccl_sp_ctas
            if flow.group in ("sp", "cp")
            else parallel.nccl_dp_ctas
            if _is_of_replicas(flow)
            else None
        )
        return 1.0 if most is None or not gpu.units else min(1.0, most / (gpu.overlap_cost * gpu.units))

    def _cost(self, flow: Flow) -> float:
        """Return the slowdown of the computation that hides a collective, as a share of the hidden time."""
        return self.machine.gpu.overlap_cost * self._ctas(flow)

    def _python(self) -> float:
        """Return the seconds of Python in a step."""
        if self.is_captured:
            return 0.0
        chunks = self.form.attention.chunks
        exchanges = 2 * sum(len(chunk.messages) + 1 for chunk in chunks) if self.form.shape.sp > 1 else 0
        layers = self.layers * (1 + self.repeats / 3 + _EXCHANGE * exchanges)
        return 1e-3 * self.machine.gpu.host_ms * (layers + 1) * self.count

    def _copies(self) -> float:
        """Return the exposed seconds of a step's copies to the host beyond the forward passes, and back beyond the backward passes."""
        seconds = self.form.activations.host / (self.machine.gpu.host_gbs * 1e9)
        forward, backward = (self.layers * one.seconds for one in (self.forward, self.backward + self.again))
        return (max(0.0, seconds - forward) + max(0.0, seconds - backward)) * self.count

    # communication

    def _exchanges(self, flows: list[Flow]) -> Iterable[Exchange]:
        """Yield all communication, that inside the layers first: ZeRO's has the rest of the link's time."""
        inside = [self._exchange(flow, self._cover(flow)) for flow in flows if _is_inside(flow)]
        inside += self._context([flow for flow in flows if flow.group == "cp"], inside)
        yield from inside
        crosses = self.machine.between is not None and self._crosses(flows)
        taken = sum(e.seconds for e in inside if self._is_between(e.flow) == crosses)
        yield from self._sharded([flow for flow in flows if not _is_inside(flow) and flow.group != "cp"], taken)

    @property
    def is_stage_3(self) -> bool:
        return self.parallel.zero_stage == 3

    def _is_between(self, flow: Flow) -> bool:
        return self.machine.crosses(flow.group, flow.ranks, self.form.shape.tp, self.form.shape.sp)

    def _crosses(self, flows: list[Flow]) -> bool:
        return any(self._is_between(flow) for flow in flows if _is_of_replicas(flow))

    def _context(self, flows: list[Flow], others: list[Exchange]) -> Iterable[Exchange]:
        """Yield communication over cp, which has the time of attention that exchanges of Ulysses leave of the same link."""
        times = self.layers * self.count
        again = 0.0 if self.form.attention.keeps_results else self.repeats
        left = {"forward": times * (1 + again) * self.forward.attention, "backward": times * self.backward.attention}
        delayed = times * self.backward.delayed if self.form.shape.sp == 1 else 0.0
        for flow in flows:
            direction = "forward" if flow.kind.endswith("forward") else "backward"
            taken = sum(
                other.hidden for other in others if other.flow.group == "sp" and self._is_between(other.flow) == self._is_between(flow)
                and (other.flow.kind == "heads, forward") == (direction == "forward")
            )  # fmt: skip
            beside = delayed if flow.kind == "gradients of keys and values" else 0.0
            exchange = self._exchange(flow, left[direction] - taken + beside)
            left[direction] -= max(0.0, exchange.hidden - beside)
            yield exchange

    def _sharded(self, flows: list[Flow], taken: float) -> Iterable[Exchange]:
        """Yield communication of gradients, parameters and scalars; ``taken``: seconds of a step in which their link is busy."""
        forward = self.layers * self.forward.seconds + self.ends.seconds / 3
        backward = self.layers * (self.backward + self.again).seconds
        free = max(0.0, 1 - taken / max(1e-12, (forward + backward) * self.count))
        left = {"forward": forward * free * self.count, "backward": backward * free * self.count}
        once = {name: seconds / self.count for name, seconds in left.items()}
        for flow in flows:
            if flow.kind in ("gradients", "gradients of experts"):
                exchange = self._exchange(flow, (left if self.parallel.zero_stage >= 2 else once)["backward"])
                left["backward"] -= min(left["backward"], exchange.hidden)
            elif flow.kind in ("parameters", "parameters of experts"):
                exchange = self._exchange(
                    flow, left["forward"] + left["backward"] if self.is_stage_3 else once["forward"]
                )
            else:
                exchange = self._exchange(flow, once["forward"])
            yield exchange

    def _exchange(self, flow: Flow, cover: float) -> Exchange:
        (tp, sp), machine = (self.form.shape.tp, self.form.shape.sp), self.machine
        num_bytes = flow.slowest or flow.num_bytes
        seconds = machine.seconds(flow.op, flow.group, flow.ranks, tp, flow.number, num_bytes, sp)
        if (share := self._ctas(flow)) < 1:
            seconds = max(seconds, num_bytes / (share * machine.inside.gbs * 1e9))
        hideable = seconds * (flow.can_hide / flow.num_bytes if flow.num_bytes else float(flow.slowest > 0))
        link = machine.link_of(flow.group, flow.ranks, tp, sp).name
        return Exchange(flow, link, seconds, min(hideable, seconds, max(0.0, cover)))

    def _cover(self, flow: Flow) -> float:
        """Return the seconds of a step's computation that can hide an exchange inside the layers."""
        times = self.layers * self.count
        if flow.kind == "heads, forward":
            again = 0.0 if self.form.attention.keeps_results else self.repeats
            return times * (1 + again) * self._beside_attention(self.forward)
        if flow.kind in ("heads, backward", "heads, made again"):
            return times * self._beside_attention(self.backward)
        if flow.group.startswith("ep"):
            one = self.backward if flow.kind.startswith("gradients") else self.forward
            return times * (one.products - one.qkv_products - one.out_products) / 2
        if flow.kind == "activations":
            return times * (self.backward.weight_products - self.backward.delayed)
        return times * self.forward.seconds

    def _beside_attention(self, one: Pass) -> float:
        chunks = len(self.form.attention.chunks)
        if chunks > 1:
            return (one.attention + one.qkv_products + one.out_products) * (chunks - 1) / chunks + one.delayed
        return one.qkv_products * 2 / 3 + (one.out_products / 2 if one.weight_products else 0.0) + one.delayed
