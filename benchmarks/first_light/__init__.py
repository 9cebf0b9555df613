"""First light: everything that a GPU has to tell about this project, for whoever has one for an hour (``scripts/first_light.sh``).

    command.py     flags, exit codes, signals            measure.py     GPU time of a call with a cold L2 cache, errors of a result
    parts/         what is measured, a module for each   steps_of.py    a few steps of the training program, with their gradients
    plan.py        the parts: order, limits              page.py        report.html
    runner.py      budget, one process for each part     markdown.py    docs/benchmarks/gpu.md
    one_part.py    that process                          report.py      report.json: what is done, and with what result
    records.py     one measurement

A part is a function of a ``Context`` that records measurements. It runs in a process group of its own, which ends with
it, with its limit, with the budget and with this program, however that ends. Nothing here changes clocks, MIG or any
other setting of a machine.
"""
