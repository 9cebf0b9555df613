"""Every way in which one line of a schedule can be wrong: left out, doubled, on other modules, of another kind, along another axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_sp.schedule.core.directives import Directive

Mutant = tuple[str, list[Directive]]


def mutants(lines: list[Directive], elsewhere: str, *, conv: bool = False) -> Iterator[Mutant]:
    """(what was done, the lines).

    Args:
        elsewhere: a glob of modules on which none of these lines may stand.
        conv: weights are [in, out].
    """
    for place, line in enumerate(lines):
        others = lines[:place] + lines[place + 1 :]
        for what, new in _changes(line, elsewhere, conv):
            yield f"{what}: {line}", others[:place] + new + others[place:]


def _changes(line: Directive, elsewhere: str, conv: bool) -> Iterator[tuple[str, list[Directive]]]:
    def but(**args: object) -> list[Directive]:
        return [replace(line, args={**line.args, **args})]

    yield "left out", []
    yield "doubled", [line, line]
    yield "moved", [replace(line, on=elsewhere, args={k: v for k, v in line.args.items() if k != "arg"})]
    if line.do == "sync":
        op = line.args["op"]
        yield "after", [replace(line, args={"mode": "fwd_post", "op": op})]
        yield "other op", but(op={"copy": "all_gather", "all_gather": "copy"}[op])
        yield "never summed", but(op="scatter")
        if op == "all_gather":
            yield "other axis", but(axis=2)
            yield "other adjoint", but(grad="slice")
    elif line.do == "row":
        yield "no reduction", [replace(line, do="shard", args={"tensor": "weight", "axis": 0 if conv else 1})]
        yield "other reduction", but(reduce={"all_reduce": "reduce_scatter", "reduce_scatter": "all_reduce"}[line.args["reduce"]])
        yield "other axis", but(reduce="reduce_scatter", axis=2)
        yield "column", [replace(line, do="column", args={"input": "copy"})]
    elif line.do == "column":
        yield "summed again", but(input="copy")
        yield "row", [replace(line, do="row", args={"reduce": "all_reduce"})]
        yield "gathered", but(gather=True)
        if "blocks" in line.args:
            yield "one block", [replace(line, args={k: v for k, v in line.args.items() if k != "blocks"})]
            yield "one block, said", but(blocks=1)
            yield "other blocks", but(blocks=3 if line.args["blocks"] == 2 else 2)
    elif line.do == "set":
        yield "nothing", but(divide="dp")
    elif line.do == "sequence":
        yield "leaves early", but(leave=line.on)
