"""Training runs: setup, loop, step, state, logs, self-checks.

The core, in reading order:
    loop.py             a whole run: join the other ranks, build, then step, save, validate, stop
    step.py             one optimizer step: micro-batches in, one update out
    parts.py            what a run consists of
    run.py              its parts, in the order in which they are built; what may fail where
    microbatches.py     global batch size and its ramp-up
    train_state.py      what a checkpoint holds, and how it is restored
    pipelined.py        a step's forward and backward passes where the model is cut into stages
    graphs.py           steps captured in CUDA graphs: when, whether, and their replays (--cuda-graphs)
    routers.py          what routers are told and tell: loads, terms, the passes that count first

Before the first step:
    setup.py            device, threads, process group, run folder, exit codes
    resume_point.py     which checkpoint to start from, if any
    resume.py           whose model is trained; the schedule and the data must be those of the checkpoint
    run_tokenizer.py    so must the tokenizer; the run keeps a copy of it
    sequences.py        which rank reads which sequences (--balance-rows), and that sharers have read the same ones
    sharding.py         the model becomes flat units, one by one; all ranks have the same initial model
    kernel_selection.py --attention-backend, --fused-kernels: which kernels run
    probe.py            --sp-overlap-mode auto measures
    memory_estimate.py  predicted memory against what there is
    announcement.py     what the run says at its start: layout, versions, hosts, whether it repeats to the last bit
    verify.py           --verify-parallelism: one step against one process

While it runs:
    saves.py            when checkpoints are written (--save-interval), and how that is reported
    sample_history.py   digests of the last steps' samples
    nan_checks.py       non-finite steps, weights and losses
    signals.py          graceful stop; end of a rank that makes no progress
    report.py           a line and a record for each logged step
    metrics.py          console, metrics.jsonl, TensorBoard, Weights & Biases
    overlap.py          --report-overlap: measured shares of hidden communication, as text and as pictures
    pipeline_times.py   the schedule of a pipeline, planned and measured, as text and as a picture
"""
