"""Training runs: setup, loop, step, state, logs, watchdog, self-checks.

The core, in reading order:
    loop.py             a whole run: join the other ranks, build, then step, save, validate, stop
    run.py              the parts of a run, in the order in which they are built; what may fail where
    step.py             one optimizer step: micro-batches in, one update out
    graphs.py           steps captured in CUDA graphs: when, whether, and their replays (--cuda-graphs)
    pipelined.py        its forward and backward passes where the model is cut into stages
    microbatches.py     global batch size and its ramp-up
    state.py            what a checkpoint holds, and how it is restored

Before the first step:
    setup.py            device, threads, process group, run folder, exit codes
    starting_point.py   which checkpoint to start from, if any
    checkpoint_model.py whose model is trained: the checkpoint's, and what flags may say against it
    resume.py           the schedule and the data must be those of the checkpoint
    balance_rows.py     --balance-rows: which rank reads which rows
    run_tokenizer.py    so must the tokenizer; the run keeps a copy of it
    sharding.py         the model becomes flat units, one by one
    fingerprint.py      all ranks have the same initial model
    fused.py            --fused-kernels: which kernels of AdamW and the norms run
    attention.py        --attention-backend auto measures
    probe.py            --sp-overlap-mode auto measures
    memory_estimate.py  predicted memory against what there is
    announcement.py     what the run says at its start
    repeats.py          and whether it repeats to the last bit
    verify.py           --verify-parallelism: one step against one process

While it runs:
    saves.py            when checkpoints are written, and how that is reported
    save_interval.py    --save-interval auto
    sample_history.py   digests of the last steps' samples
    same_sequences.py   ranks that share sequences have read the same ones
    routers.py          what routers are told and tell: loads, terms, the passes that count first
    finite.py           non-finite weights and losses
    signals.py          graceful stop
    watchdog.py         end of a rank that makes no progress
    report.py           a line and a record for each logged step
    metrics.py          metrics.jsonl, TensorBoard, Weights & Biases
    console.py          lines and the progress bar
    environment.py      versions, device, hosts
    overlap.py          --report-overlap: measured shares of hidden communication
    overlap_picture.py  the same as a picture
    pipeline_times.py   the schedule of a pipeline, planned and measured
    pipeline_picture.py the same as text and as a picture
"""
