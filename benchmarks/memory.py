"""Peak memory of a training step per rank, measured, against what a run without contents predicts.

    python benchmarks/memory.py [--layers 4] [--hidden 256] [--seq-length 1024] [--vocab 4096] [--json docs/benchmarks/memory.json]

Every layout trains two steps of a small GPT, fp32 on gloo ranks of this machine, and each rank counts the bytes of its
live tensors (``benchmarks/storages.py``: storages, not resident memory). With --device cuda it is one rank, bf16, and
the allocator that counts. The second step is the one that is reported: it begins with the first one's gradients in
place, as all later ones do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import print_table, write_json

MIB = 2**20


@dataclass(frozen=True)
class Layout:
    """One line of the table: sizes of the axes, overrides of the model and of the kernels, and the number of micro-batches."""

    sp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    tp_seq: bool = False
    mode: str = "none"
    zero: dict[str, Any] = field(default_factory=dict)  # fields of ParallelConfig: of ZeRO and of cp
    micro_batches: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    slices: int = 1
    bf16: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.pp * self.cp * self.sp * self.tp * self.dp

    def parallel(self) -> Any:
        """The parallel section of the configuration."""
        from megatron_sp.config.schema import ParallelConfig

        pipeline = {"pipeline_schedule": self.schedule, "pipeline_slices": self.slices if self.slices > 1 else None}
        return ParallelConfig(
            tensor_model_parallel_size=self.tp, sequence_parallel=self.tp_seq, sequence_parallel_size=self.sp,
            sp_overlap_mode=self.mode, context_parallel_size=self.cp, pipeline_model_parallel_size=self.pp,
            **(pipeline if self.pp > 1 else {}), **self.zero,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [f"dp {self.dp}"] if self.dp > 1 else []
        words += [f"cp {self.cp}"] if self.cp > 1 else []
        words += [f"sp {self.sp}"] if self.sp > 1 or (self.tp == 1 and self.dp == 1 and self.cp == 1) else []
        words += [f"tp {self.tp}{' with sequence parallel' if self.tp_seq else ''}"] if self.tp > 1 else []
        words += (
            [f"pp {self.pp} ({self.schedule}{f', {self.slices} slices' if self.slices > 1 else ''})"]
            if self.pp > 1
            else []
        )
        words += [self.mode] if self.mode != "none" else []
        words += [f"{k} {v}" for k, v in {**self.zero, **self.model, **self.kernels}.items()]
        words += ["bf16"] if self.bf16 else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(words)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """For ``Layout.zero``."""
    return {"zero_stage": stage, **more}


EVERY = 7  # so many tokens are one that BERT has to guess
BERT = {"model_family": "bert"}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
DROPOUT = {"hidden_dropout": 0.1}
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "num_query_groups": 4,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
LAYOUTS = [
    Layout(), Layout(sp=2), Layout(sp=4), Layout(sp=2, mode="chunked"), Layout(sp=2, mode="split-qkv"), Layout(tp=2),
    Layout(tp=2, tp_seq=True), Layout(tp=2, tp_seq=True, sp=2), Layout(sp=2, kernels=FULL), Layout(kernels=FULL),
    Layout(sp=2, kernels=SELECTIVE), Layout(sp=2, model=DROPOUT), Layout(sp=2, micro_batches=2), Layout(sp=2, model=LLAMA),
    *(Layout(dp=2, zero=zero(stage)) for stage in (1, 2, 3)), Layout(dp=2, zero=zero(3), kernels=FULL),
    *(Layout(dp=2, zero=zero(stage), micro_batches=2) for stage in (1, 2, 3)), Layout(sp=2, zero=zero(3, zero3_gather_once=True)),
    Layout(dp=4, zero=zero(3)), Layout(model=BERT), Layout(sp=2, model=BERT | {"norm_placement": "post"}),
    Layout(tp=2, tp_seq=True, model=BERT), Layout(dp=2, zero=zero(3), model=BERT),
]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="sequences per micro-batch (default: 2)")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--smoke", action="store_true", help="two layouts of a smaller model")
    parser.add_argument("--lines", action="store_true", help="print the prediction of each layout line by line")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    shape = {
        "num_layers": options.layers, "hidden_size": options.hidden, "num_attention_heads": options.heads, "vocab_size": options.vocab,
        "seq_length": options.seq_length, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    layouts = LAYOUTS
    if options.smoke:
        shape, layouts = {**shape, "num_layers": 2, "seq_length": 256, "vocab_size": 1024}, [Layout(), Layout(sp=2)]
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("--device cuda needs a GPU", file=sys.stderr)
            return 2
        layouts = [replace(layout, sp=1, tp=1, dp=1, tp_seq=False, mode="none", bf16=True) for layout in layouts]
        layouts = [layout for i, layout in enumerate(layouts) if layout not in layouts[:i]]
    results: dict[str, Any] = {"shape": shape, "batch": options.batch, "device": options.device, "layouts": {}}
    rows = []
    for layout in layouts:
        measured = run(layout, shape, options.batch, options.device)
        plan = predict(layout, shape, options.batch, options.device)
        largest = max(m["peak"] for m in measured)
        resident = max(m["resident"] for m in measured)
        if options.device == "cuda":
            from first_light.prediction import with_workspaces

            plan = with_workspaces(plan)
        rows.append(
            [
                str(layout),
                *(f"{b / MIB:.2f}" for b in (resident, plan.resident, largest, plan.peak)),
                f"{largest / plan.peak:.3f}",
            ]
        )
        results["layouts"][str(layout)] = {"layout": asdict(layout), "ranks": measured, "predicted": plan.as_dict()}
        if options.lines:
            for line in (*plan.stays, *plan.worst.lines):
                print(f"  {line.num_bytes / MIB:10.2f}  {line.name}")
    print_table(
        f"Memory per rank, MiB, {options.device}",
        ["layout", "resident", "predicted", "peak", "predicted", "peak / predicted"],
        rows,
    )
    write_json(options.json, "memory", results, {"torch": str(torch.__version__)})
    return 0


def config_of(layout: Layout, shape: dict[str, Any], batch: int) -> Any:
    """The configuration of a layout."""
    from megatron_sp.config.schema import BatchConfig, Config, DataConfig, KernelConfig, ModelConfig, PrecisionConfig

    sizes = BatchConfig(micro_batch_size=batch, global_batch_size=batch * layout.micro_batches * layout.dp)
    return Config(
        ModelConfig(**{**shape, **layout.model}), layout.parallel(), KernelConfig(**layout.kernels), sizes,
        precision=PrecisionConfig(bf16=layout.bf16), data=DataConfig(mask_prob=1 / EVERY),
    )  # fmt: skip


def predict(layout: Layout, shape: dict[str, Any], batch: int, device: Any = "cpu") -> Any:
    """The memory of a layout's rank that holds most, by a run without contents."""
    from megatron_sp.planner.fake_run import predict

    return predict(config_of(layout, shape, batch), layout.ranks, device).memory


def run(layout: Layout, shape: dict[str, Any], batch: int, device: str = "cpu") -> list[dict[str, int]]:
    """{resident, peak} of each rank, in forked processes (on a GPU: in this one)."""
    import torch
    import torch.multiprocessing as mp
    from storages import StorageCount

    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            _worker(0, layout, shape, batch, device, folder)
        else:
            with StorageCount():  # what a dispatch mode imports is imported once, here, instead of in every child
                torch.zeros(1)
            mp.start_processes(
                _worker, (layout, shape, batch, device, folder), nprocs=layout.ranks, start_method="fork"
            )
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(layout.ranks)]


def _worker(rank: int, layout: Layout, shape: dict[str, Any], batch: int, device: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=layout.ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        (Path(folder) / f"{rank}.json").write_text(json.dumps(measure(layout, shape, batch, device)))
    finally:
        dist.destroy_process_group()


def measure(layout: Layout, shape: dict[str, Any], batch: int, device: str = "cpu") -> dict[str, int]:
    """Train two steps on this rank, whose process group exists already.

    Returns:
        bytes: ``resident`` when the second step begins (without gradients), ``peak`` within it, and the peak within its
        forward passes, backward passes and update.
    """
    counter = Counter(device)
    with counter.mode:
        training = Training(layout, shape, batch, device, counter)
        training.step(1)
        counter.phases.clear()
        training.step(2)
        training.train_step.weights.settle()
    return {"resident": counter.resident, "peak": max(counter.phases.values()), **counter.phases}


class Counter:
    """Peaks of phases: those since the last call, under a name."""

    def __init__(self, device: str) -> None:
        from storages import StorageCount

        self.mode, self.device = StorageCount(), device
        self.phases: dict[str, int] = {}
        self.resident, self.latest = 0, "forward"

    def begin(self) -> None:
        """A step begins: the last one's gradients are gone, the micro-batches are there."""
        import torch

        self.resident = self.mode.live if self.device == "cpu" else torch.cuda.memory_allocated()
        self.end("")

    def end(self, phase: str) -> None:
        """A phase is over."""
        import torch

        peak = self.mode.peak if self.device == "cpu" else torch.cuda.max_memory_allocated()
        if self.device == "cpu":
            time.sleep(
                0.01
            )  # gloo's thread lets go of a collective's tensors a moment after whoever waited for it has gone on
        if phase:
            self.latest = phase
            self.phases[phase] = max(peak, self.phases.get(phase, 0))
        self.mode.reset_peak()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


class Training:
    """Model, flat buffers, optimizer and step, put together as a run does."""

    def __init__(self, layout: Layout, shape: dict[str, Any], batch: int, device: str, counter: Counter) -> None:
        import torch

        from megatron_sp.comm.groups import ParallelGroups
        from megatron_sp.config.schema import KernelConfig, ModelConfig, OptimizerConfig
        from megatron_sp.estimate.layout import layer_costs, layers_of_stages
        from megatron_sp.models.bert import BertModel
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.models.transformer import delayed_weights
        from megatron_sp.ops.attention_choice import choose_kernel
        from megatron_sp.optim.flat import FlatUnit, Zero
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
        from megatron_sp.optim.weights import WholeWeights
        from megatron_sp.parallel.forward_context import TABLE
        from megatron_sp.parallel.layers import attach_main_grad, shard_specs
        from megatron_sp.parallel.parallel_context import NO_EP, ExpertParallel
        from megatron_sp.parallel.parallel_context import ParallelContext as Parallel
        from megatron_sp.training.pipelined import Pipeline
        from megatron_sp.training.sharding import pools_of_model, units_together
        from megatron_sp.training.step import Loss, StepOptions, StepParts, TrainStep

        self.config = config = ModelConfig(**{**shape, **layout.model})
        self.layout, self.batch, self.device, self.counter = layout, batch, torch.device(device), counter
        dtype = torch.bfloat16 if layout.bf16 else torch.float32
        groups = ParallelGroups.create(
            self.device, tp_size=layout.tp, sp_size=layout.sp, cp_size=layout.cp, pp_size=layout.pp
        )
        mode: Any = layout.mode
        sharding = layout.parallel()
        kind: Any = sharding.pipeline_kind
        stages = layers_of_stages(config, sharding) if layout.pp > 1 else ()
        costs = layer_costs(config, KernelConfig(**layout.kernels))
        pipeline = Pipeline(groups, kind, stages, layout.slices, costs) if layout.pp > 1 else None
        parallel = Parallel.of(
            groups, tp_seq=layout.tp_seq, mode=mode, num_chunks=2, overlap=mode != "none", cp_chunks=sharding.cp_chunks,
            cp_stages_ahead=sharding.num_stages_ahead, cp_keep_kv=sharding.cp_keep_kv,
            stages=() if pipeline is None else pipeline.own_stages, num_slices=layout.slices,
            ep=NO_EP if not config.has_experts else ExpertParallel.create(
                groups, sharding.expert_model_parallel_size, tp_seq=layout.tp_seq, chunks=sharding.moe_chunks
            ),
        )  # fmt: skip
        model = (BertModel if config.is_bert else GPTModel)(
            config, KernelConfig(**layout.kernels), seed=1, dtype=dtype, layout=parallel
        ).to(self.device)
        names, specs = {id(p): n for n, p in model.named_parameters()}, shard_specs(model)
        zeros = {name: Zero(sharding.zero_stage, groups.dp_cp_sp) for name in (unit.name for unit in model.units())}
        if TABLE in zeros:
            zeros[TABLE] = Zero(sharding.zero_stage, groups.ends or groups.dp_cp_sp).of("whole")
        zeros |= {
            u.name: Zero(sharding.zero_stage, parallel.ep.replicas) for u in model.units() if u.alike == "experts"
        }
        units = [
            FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()], specs, zeros[u.name])
            for u in model.units()
        ]
        tables = [index for index, unit in enumerate(units) if unit.name == TABLE]
        experts = [index for index, unit in enumerate(model.units()) if unit.alike == "experts"]
        elsewhere = set(tables if groups.pp_rank else ())
        if experts:
            elsewhere |= {index for index, unit in enumerate(units) if unit.zero.group.rank() > 0}
        gradients = FlatGradients(
            units, groups.dp_cp_sp, tp=groups.tp, overlap=sharding.overlap_grad_reduce,
            reduce_dtype=torch.bfloat16 if sharding.grad_reduce_in_bf16 else None,
            own_groups={index: units[index].zero.group for index in (*tables, *experts)},
            delayed=delayed_weights(model, parallel.tp) if sharding.delay_wgrad else (),
        )  # fmt: skip
        weights = WholeWeights(
            units, pools=pools_of_model(model, sharding), order=[] if pipeline else model.unit_order(backward=True),
            overlap=sharding.overlap_param_gather,
            fetch=sharding.zero3_fetch, together=units_together(model),
        )  # fmt: skip
        attach_main_grad(model, gradients)

        def sums(model: Any, batch: Any, context: Any, events: Any) -> Any:
            shown = (batch["tokens"], batch["types"]) if config.is_bert else (batch["tokens"],)
            order = (batch.get("order"),) if config.is_bert else ()
            made = model(*shown, batch["labels"], batch["loss_mask"], *order, context, events)
            terms = [term for term in made[: 2 if config.has_order_head else 1]]
            if pipeline is None:  # else the loss is a part of backward
                counter.end("forward")
            return terms

        def hidden(model: Any, batch: Any, context: Any, events: Any) -> Any:
            made = model.hidden(batch["tokens"], context, events, batch.get("types"))
            counter.end("forward")
            return made

        names = ("lm loss", "order loss")[: 1 + config.has_order_head]

        def counts(batch: Any) -> Any:
            count = batch["loss_mask"].sum()
            return [count, torch.ones_like(count) * len(batch["tokens"])] if config.has_order_head else [count]

        start, leave, finish = gradients.start_step, gradients.finish_micro_batch, gradients.finish_step
        put_off = gradients.put_off

        def begin_or_end(key: Any = None, units: Any = ()) -> None:
            """A stage's backward pass begins, with units, or ends; what comes between two passes is of the first."""
            put_off(key, units)
            counter.end(counter.latest if units else "backward")

        gradients.put_off = begin_or_end  # type: ignore[method-assign]
        gradients.start_step = lambda: (start(), counter.begin())[0]  # type: ignore[method-assign,func-returns-value]
        gradients.finish_micro_batch = lambda units=None: (leave(units), counter.end("backward"))[0]  # type: ignore[method-assign,func-returns-value]
        gradients.finish_step = lambda: (finish(), counter.end("backward"))[0]  # type: ignore[method-assign,func-returns-value]
        self.train_step = TrainStep(
            StepParts(
                model, weights, gradients,
                FlatOptimizer(
                    units, OptimizerConfig(lr=1e-3), tp=groups.tp, everybody=groups.world,
                    whole=groups.world if experts else groups.pp_tp, counted_elsewhere=elsewhere,
                ),
                LossScaler(enabled=False, fixed=None, initial=1.0, minimum=1.0, window=1, hysteresis=1), pipeline,
            ),
            Loss(names, counts, sums, causal=not config.is_bert, hidden=hidden), groups,
            StepOptions(
                seed=1, drops=max(config.attention_dropout, config.hidden_dropout) > 0,
                kernel=choose_kernel("auto", device, dtype, config.attention_dropout).name,
            ),
        )  # fmt: skip

    def step(self, number: int) -> None:
        import torch

        assert self.config.vocab_size and self.config.seq_length
        batches = []
        for index in range(self.layout.micro_batches):
            shape, generator = (self.batch, self.config.seq_length), torch.Generator().manual_seed(100 * number + index)
            tokens, labels = (
                torch.randint(self.config.vocab_size, shape, generator=generator).to(self.device) for _ in range(2)
            )
            ids = torch.arange(self.batch, device=self.device) + index * self.batch
            mask = torch.ones(shape, device=self.device)
            batches.append({"tokens": tokens, "labels": labels, "loss_mask": mask, "sample_ids": ids})
            if self.config.is_bert:
                mask *= torch.arange(self.config.seq_length, device=self.device) % EVERY == 0
                batches[-1] |= {"types": tokens % 2, "order": tokens[:, 0] % 2}
            del tokens, labels, mask
        digests = [torch.zeros(self.batch, dtype=torch.float64)] * len(batches)
        places = torch.arange(self.batch * len(batches)).chunk(len(batches))
        self.train_step.run(batches, number, lr=1e-3, weight_decay=0.1, digests=digests, places=list(places))
        self.counter.end("update")


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
