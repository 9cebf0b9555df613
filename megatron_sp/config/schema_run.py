"""Flags of what a run keeps: checkpoints, and logs, metrics and profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_sp.config.conditions import LOADS, PROFILES, SAVES, TENSORBOARD, WANDB, WITH_STATE
from megatron_sp.utils.flag_field import flag

# dense (not sparse) peak TFLOP/s of matrix products, from the vendors' data sheets
PEAK_TFLOPS = {
    "a100-bf16": 312.0, "a100-fp16": 312.0, "h100-bf16": 989.0, "h100-pcie-bf16": 756.0, "h200-bf16": 989.0,
    "h800-bf16": 989.0, "b200-bf16": 2250.0, "l40s-bf16": 362.0, "a10-bf16": 125.0, "v100-fp16": 125.0,
    "rtx4090-bf16": 165.0, "mi300x-bf16": 1307.0,
}  # fmt: skip
"""Devices that --peak-tflops knows by name."""


@dataclass
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = flag(
        None,
        "run folder: checkpoints, metrics.jsonl, run_status.json (default: runs/NAME-TIME, without checkpoints)",
        path=True,
    )
    load: str | None = flag(
        None,
        "a run, its checkpoints folder, or one step folder; absent is an error, except in a first run whose --save"
        " is the same folder: that starts afresh",
        path=True,
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "nothing to load is an error in that first run, too (exit code 3)", only=LOADS
    )
    auto_resume: bool = flag(
        False, "go on from the newest verified checkpoint under --save, or start afresh if there is none"
    )
    save_interval: int | Literal["auto"] | None = flag(
        None,
        "save every so many steps, and always at the end (0: only then); auto: as often as loses least, by what a save is measured to"
        " cost", unit="steps", low=0, high=10**12, only=SAVES)  # fmt: skip
    mean_time_between_failures_hours: float | None = flag(
        None,
        "of the whole run, for --save-interval auto (default: 50,000 hours of one process, divided by their number)",
        unit="hours", low=0.001,
    )  # fmt: skip
    async_save: bool = flag(
        True,
        "copy what is saved to host memory, which is kept for it, and write while training goes on (--no-async-save: training waits)",
        only=SAVES,
    )
    ckpt_step: int | None = flag(None, "load this step instead of the newest", unit="steps", low=0)
    resume_fallback: bool = flag(False, "if the newest checkpoint is damaged, take the newest sound one before it")
    finetune: bool = flag(
        False,
        "load weights only and start at step 0; rotary positions and window may be others than before, for a longer context",
    )
    no_load_optim: bool = flag(False, "do not load the optimizer's state", only=(LOADS, WITH_STATE))
    no_save_optim: bool = flag(False, "save weights only (such a checkpoint cannot resume exactly)", only=SAVES)
    use_checkpoint_args: bool = flag(
        False,
        "take the model from the checkpoint, and its tokenizer where no flag names one; a flag that says another"
        " model is an error, what belongs to training (dropout, coefficients) counts where it is given",
    )
    keep_last: int = flag(
        2, "verified checkpoints to keep, at least 2", unit="checkpoints", low=2, high=10**9, only=SAVES
    )
    keep_every: int | None = flag(
        None,
        "also keep every checkpoint whose step is a multiple of this",
        unit="steps",
        aliases=("save-retain-interval",),
        low=1,
        only=SAVES,
    )
    accept_data_change: bool = flag(
        False, "resume although data, tokenizer, split, sequence length or seed changed", only=LOADS
    )


@dataclass
class LoggingConfig:
    """Logs, metrics and profiling."""

    log_interval: int = flag(
        100, "one line and one metrics.jsonl record every so many steps", unit="steps", low=1, high=10**12
    )
    no_progress_bar: bool = flag(False, "plain lines even on a terminal")
    peak_tflops: str | None = flag(
        None,
        "peak for MFU: a number in TFLOP/s or a name such as h100-bf16 (default: by the GPU's name; measured on CPU)",
    )
    log_params_norm: bool = flag(False, "add the L2 norm of the parameters to each record")
    log_num_zeros_in_grad: bool = flag(False, "add the number of zeros in the gradients to each record")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events there (needs the extra 'log')", path=True)
    tensorboard_queue_size: int = flag(
        1000, "events kept in memory before a write", low=1, high=10**6, only=TENSORBOARD
    )
    wandb_project: str | None = flag(None, "log to this Weights & Biases project (needs the extra 'log')")
    wandb_exp_name: str | None = flag(None, "name of the W&B run", only=WANDB)
    profile: bool = flag(False, "write a torch profiler trace into the run folder")
    profile_step_start: int = flag(10, "first profiled step", unit="steps", low=0, high=10**12, only=PROFILES)
    profile_step_end: int = flag(
        12, "step before which profiling stops", unit="steps", low=0, high=10**12, only=PROFILES
    )
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that write a trace", only=PROFILES)
    report_overlap: int | None = flag(
        None,
        "after N steps (10 if no number is given) print how much of each layer's exchanges ran under computation, and draw the time line;"
        " of a pipeline print and draw the schedule, planned and measured",
        unit="steps", low=1, alone=10, high=10_000)  # fmt: skip
    enable_fault_injection: bool = flag(False, "honour the variable MEGATRON_SP_FAULT (tests only)")
