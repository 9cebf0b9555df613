"""Training runs: setup, loop, step, state, logs, self-checks.

The core, in reading order:
    loop.py             a whole run: join the other ranks, build, then step, save, validate, stop
    step.py             one optimizer step: micro-batches in, one update out
    parts.py            what a run consists of
    run.py              its parts, in the order in which they are built; what may fail where
    microbatches.py     global batch size, its ramp-up; rows of each rank, and that sharers read the same
    train_state.py      what a checkpoint holds, and how it is restored; digests of the last steps' samples
    pipelined.py        a step's forward and backward passes where the model is cut into stages
    graphs.py           steps captured in CUDA graphs: when, whether, and their replays (--cuda-graphs)

Before the first step:
    setup.py            device, threads, process group, run folder, exit codes
    resume_point.py     which checkpoint to start from, if any, and how it is loaded
    resume.py           whose model is trained; schedule, data and tokenizer must be those of the checkpoint
    sharding.py         the model becomes flat units, one by one; all ranks have the same initial model
    kernel_selection.py --attention-backend, --fused-kernels: which kernels run
    probe.py            --sp-overlap-mode auto measures
    memory_estimate.py  predicted memory against what there is
    verify.py           --verify-parallelism: one step against one process

While it runs:
    saves.py            when checkpoints are written (--save-interval), and how that is reported
    nan_checks.py       non-finite steps, weights and losses
    signals.py          graceful stop; end of a rank that makes no progress
    report.py           what a run says at its start, and a line and a record for each logged step
    metrics.py          console, metrics.jsonl, TensorBoard, Weights & Biases
    overlap.py          --report-overlap: measured shares of hidden communication, as text and as pictures
    pipeline_times.py   the schedule of a pipeline, planned and measured, as text and as a picture
"""
