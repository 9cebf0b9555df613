"""Every way in which a line about sequences can be wrong, for each family of presets and a model of our own; a table of who notices.

    python tests/support/schedule_sp_mutants.py [--write] [--tables "sp,tp and sp,tp"]

Each mutant goes to ``check()``, and to ``verify()`` on 2 ranks (sp), or on 4 (tp and sp) and on 2 (tp) where
``check()`` lets it pass.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.check.check import check
from megatron_sp.schedule.check.derive import with_derived
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.presets import auto
from megatron_sp.schedule.verify.verify import verify
from megatron_sp.utils.errors import ConfigError
from support.core_toys import Toy
from support.preset_models import FAMILIES, batch_of, covers, make
from support.ranks import run_ranks

Mutant = tuple[str, list[Directive]]
#: (family, tp_seq)
COVERED = [name for name in FAMILIES if covers(name, sp=2, tp=2, seq=True)]
OVER_TP = [name for name in FAMILIES if not covers(name, sp=2)]
CASES = [*((name, False) for name in ("core", *COVERED)), *((name, True) for name in (*COVERED, *OVER_TP))]
TABLES = {
    "sp": "Sequences cut over sp",
    "tp and sp": "Cut over sp, and between the layers over tp",
    "tp": "Between the layers over tp, in families that are not cut over sp",
}
PREFACE = """\
# Mutants of lines about sequences

Written by `python tests/support/schedule_sp_mutants.py --write`. In the schedule of each preset, and in that of a model of our own
(core), each line about sequences is left out, doubled, moved or changed. A cell is what `check()` says, without ranks: the code of the
mistake (`refused`: in words), or `=` where it lets the mutant pass, and `verify()` on ranks finds it equal to the whole model: another
way to say the same; `wrong` where it does not. Every message names a module. `verify()` was asked about all that are cut over sp alone,
on 2 ranks, and of the others about those that `check()` lets pass, on 4 and on 2. What `check()` refuses and `verify()` finds equal is
marked `*`.
"""
PAGE = Path(__file__).parents[2] / "docs/explanation/mutants_schedule.md"


def right(name: str, seq: bool, mesh: Mesh) -> tuple[Schedule, dict[str, Any], tuple[str, str, str]]:
    """(schedule, batch, (first block, second block, where sequences are whole again)); of "llama+overlap" exchanges start early."""
    name, _, overlap = name.partition("+")
    if name == "core":
        ids = torch.arange(24).reshape(3, 8) % 37
        s = schedule(Toy(), mesh).ulysses(core="blocks.*.core", q="query", k="k", v="v", inputs=["ids"], positions="at", layout="bshd")
        return s, {"ids": ids}, ("blocks.0", "blocks.1", "norm")
    s = auto(make(name), mesh, seq=seq)
    if overlap:
        s.directives = [_but(d, overlap_qkv=True) if d.do == "ulysses" else d for d in s.directives]
    cuts = next(d for d in auto(make(name), Mesh.sizes(tp=2), seq=True).directives if d.do == "sequence")
    return s, batch_of(name), _places(cuts)


def _places(cuts: Directive) -> tuple[str, str, str]:
    return cuts.on, cuts.on.replace("0", "1"), cuts.args["leave"]


def table_of(name: str, seq: bool) -> str:
    return "sp" if not seq else "tp" if name in OVER_TP else "tp and sp"


def sizes(name: str, seq: bool) -> tuple[int, int]:
    """Of tp and sp."""
    return {"sp": (1, 2), "tp and sp": (2, 2), "tp": (2, 1)}[table_of(name, seq)]


def mutants(s: Schedule, places: tuple[str, str, str]) -> Iterator[Mutant]:
    """(what was done, the lines)."""
    for place, line in enumerate(s.directives):
        before, behind = s.directives[:place], s.directives[place + 1 :]
        changes = {"ulysses": _of_ulysses, "sequence": _of_sequence}.get(line.do, _of_edges)
        for what, new in changes(line, places):
            yield f"{_short(line)}: {what}", [*before, *new, *behind]


def _short(line: Directive) -> str:
    if line.do == "ulysses":
        return line.do
    words = f"{line.do} {line.args['op']}" if line.do == "sync" else line.do
    return f"{words} at {line.on}"


def _row(what: str) -> str:
    """Of the table: a mutant without the place of its line."""
    return re.sub(r" at [^ ]+: ", ": ", what)


def _but(line: Directive, **changes: Any) -> Directive:
    """A line with other arguments; None leaves one out."""
    return replace(line, args={k: v for k, v in {**line.args, **changes}.items() if v is not None})


def _of_ulysses(line: Directive, places: tuple[str, str, str]) -> Iterator[tuple[str, list[Directive]]]:
    first, second, last = places
    yield "left out", []
    yield "doubled", [line, line]
    yield "over tp", [_but(line, axis="tp")]
    yield "over dp", [_but(line, axis="dp")]
    region = _but(line, enter=first, leave=last, inputs=None, positions=None)
    yield "between blocks", [region]
    yield "inputs and labels", [_but(line, enter=None, leave=None)]
    yield "enters late", [_but(region, enter=second)]
    yield "leaves early", [_but(region, leave=first)]
    yield "enter left out", [_but(region, enter=None)]
    yield "leave left out", [_but(region, leave=None)]
    yield "enters and leaves at the same block", [_but(region, enter=second, leave=second)]
    yield "leaves before it enters", [_but(region, enter=last, leave=first)]
    for on, what in ((second, "a block"), (last, "the last norm")):
        for mode, op, args in (
            ("fwd_pre", "all_gather", {}), ("fwd_post", "all_gather", {}), ("fwd_pre", "scatter", {}), ("fwd_pre", "copy", {}),
            ("fwd_post", "all_reduce", {}),
        ):  # fmt: skip
            extra = Directive(on, "sync", {"mode": mode, "op": op, "over": "sp", **args}, line.where)
            yield f"{op} over sp at {what}, {mode}", [line, extra]
    if "core" in line.args:
        yield "positions left out", [_but(line, positions=None)]
        yield "inputs left out", [_but(line, inputs=None)]
        yield "core elsewhere", [_but(line, core="idle", q="input", k="input", v="input")]
        yield "core at one block", [_but(line, core="blocks.0.core")]
        yield "other layout", [_but(line, layout="bhsd")]
        yield "sequence and batch", [_but(line, layout="sbhd")]
        yield "q and k are one", [_but(line, q="k")]
        yield "v and k are one", [_but(line, v="k")]
        return
    yield "loss next_token", [_but(line, loss="next_token")]
    yield "loss per_token", [_but(line, loss="per_token")]
    yield "other argument", [_but(region, arg=1)]


def _of_sequence(line: Directive, places: tuple[str, str, str]) -> Iterator[tuple[str, list[Directive]]]:
    first, second, _ = _places(line)  # an encoder and a decoder have one each
    yield "left out", []
    yield "doubled", [line, line]
    yield "enters late", [replace(line, on=second)]
    yield "leaves early", [_but(line, leave=first)]
    yield "gradients of one block are summed", [_but(line, inside=first)]


def _of_edges(line: Directive, places: tuple[str, str, str]) -> Iterator[tuple[str, list[Directive]]]:
    """Where a cut sequence is made whole and cut again, and where gradients are summed."""
    op = line.args.get("op", line.args.get("reduce"))
    if line.do == "sum_gradients":
        yield "left out", []
    elif op == "all_gather":
        yield "left out", []
        yield "doubled", [line, line]
        yield "over sp", [_but(line, over="sp")]
        yield "copy", [_but(line, op="copy")]
        yield "other adjoint", [_but(line, grad="slice")]
        yield "other axis", [_but(line, axis=2)]
    elif op == "reduce_scatter":
        yield "all_reduce", [_but(line, reduce="all_reduce")]
        yield "other axis", [_but(line, axis=2)]


def names_a_module(s: Schedule, text: str) -> bool:
    """Whether a message does; the model itself goes by its class."""
    paths = [path for path, _ in s.model.named_modules() if path]
    return type(s.model).__name__ in text or any(re.search(rf"\b{re.escape(path)}\b", text) for path in paths)


def said(s: Schedule, lines: list[Directive], batch: dict[str, Any]) -> str:
    """What check() says: "" or the code of the mistake. Raises AssertionError: it names no module."""
    try:
        check(s.model, lines, s.mesh, s.seq_dim, batch)
        return ""
    except ConfigError as error:
        assert names_a_module(s, str(error)), (lines, str(error))
        code = re.findall(r"\b(E\d+|unknown)\)", str(error))
        return code[0] if code else "refused"


def is_right(name: str, seq: bool, what: str) -> bool:
    """Whether a mutant is another way to say the same, as verify() finds; everything else is a mistake."""
    name = name.partition("+")[0]
    per_token = name in ("bert", "roberta", "modernbert")
    if name == "clip":  # of two blocks of images, the second is where the region ends
        return what == "sequence at vision_model.encoder.layers.0: gradients of one block are summed"
    return _row(what) in {
        "ulysses: between blocks",
        "sum_gradients: left out",  # a region sums them, and without tp there is nothing to sum
        *(["ulysses: inputs and labels"] if name != "vit" else []),
        *(["ulysses: loss next_token"] if not per_token else []),
        *(["ulysses: loss per_token"] if per_token or name == "vit" else []),  # vit is cut between blocks, where no loss is
        *(["sequence: gradients of one block are summed"] if name in ("bert", "roberta") else []),  # the other is where the region ends
    }


def judged(name: str, seq: bool, take: slice = slice(None)) -> dict[str, str]:
    """What check() says of each mutant."""
    tp, sp = sizes(name, seq)
    s, batch, places = right(name, seq, Mesh.sizes(tp=tp, sp=sp))
    return {what: said(s, lines, batch) for what, lines in list(mutants(s, places))[take]}


def _computed(name: str, seq: bool, only: list[str] | None, file: str) -> None:
    """Whether verify() finds each mutant equal to the whole model; on every rank."""
    tp, sp = sizes(name, seq)
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=sp))
    s, batch, places = right(name, seq, mesh)
    found: dict[str, bool] = {}
    for what, lines in mutants(s, places):
        if only is not None and what not in only:
            continue
        with suppress(ConfigError):
            lines = with_derived(lines, check(s.model, lines, mesh, s.seq_dim, batch))
        try:
            equal = verify(s.model, lines, mesh, s.seq_dim, batch).ok
        except Exception:  # sizes that do not fit, on every rank alike
            equal = False
        found[what] = equal
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))


def computed(name: str, seq: bool, folder: Path, only: list[str] | None = None) -> dict[str, bool]:
    """What verify() says of mutants: whether they are equal to the whole model after all."""
    file = folder / "found.json"
    tp, sp = sizes(name, seq)
    right(name, seq, Mesh.sizes(tp=tp, sp=sp))  # everything is imported once, before the fork
    run_ranks(_computed, tp * sp, folder, name, seq, only, str(file))
    found: dict[str, bool] = json.loads(file.read_text())
    return found


Answers = dict[str, tuple[str, bool | None]]


def section(table: str, results: dict[str, Answers]) -> str:
    """One table, of all its families."""
    answers = [answer for found in results.values() for answer in found.values()]
    refused = [equal for code, equal in answers if code]
    counts = f"{len(answers)} mutants: {len(refused)} refused by `check()`, {len(answers) - len(refused)} not."
    counts += f" `verify()` was asked about {sum(equal is not None for _, equal in answers)}; of what `check()` refuses it finds"
    rows: dict[str, dict[str, list[str]]] = {}
    for name, found in results.items():
        for what, (code, equal) in found.items():
            row = _row(what)
            cell = (code + "*" * bool(equal)) if code else "=" if equal else "wrong"
            rows.setdefault(row, {}).setdefault(name, []).append(cell)
    lines = [f"## {TABLES[table]}", "", f"{counts} {sum(bool(e) for e in refused)} equal.", ""]
    lines += [f"| mutant | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    for row, cells in rows.items():
        lines.append(f"| {row} | {' | '.join(' '.join(sorted(set(cells.get(name, [])))) for name in results)} |")
    return "\n".join([*lines, ""])


def page(sections: dict[str, str]) -> str:
    """For the docs; tables that are not given stay as they are there."""
    there = {part.partition("\n")[0]: f"## {part}" for part in PAGE.read_text().split("\n## ")[1:]}
    parts = [sections.get(table) or there[title].rstrip("\n") + "\n" for table, title in TABLES.items()]
    return "\n".join([PREFACE, *parts])


def main() -> int:
    parser = argparse.ArgumentParser(description="Break lines about sequences on purpose and see who notices.")
    parser.add_argument("--only", default="", help="families whose name contains this; writes nothing")
    parser.add_argument("--tables", default=",".join(TABLES), help="those to make, separated by commas")
    parser.add_argument("--write", action="store_true", help=f"write them into {PAGE.name}")
    args = parser.parse_args()
    chosen = args.tables.split(",")
    results: dict[str, dict[str, Answers]] = {table: {} for table in chosen}
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        for name, seq in (case for case in CASES if args.only in case[0] and table_of(*case) in chosen):
            codes = judged(name, seq)
            passed = [what for what, code in codes.items() if not code] if seq else None
            equal = {} if passed == [] else computed(name, seq, Path(folder), passed)
            results[table_of(name, seq)][name] = {what: (code, equal.get(what)) for what, code in codes.items()}
            survivors += [f"{name} {seq}: {what}" for what, code in codes.items() if not code and not equal[what]]
            print(f"{name}, tp_seq {seq}: {sum(map(bool, codes.values()))} of {len(codes)} refused; not: {equal}", flush=True)
    if args.write and not args.only:
        PAGE.write_text(page({table: section(table, found) for table, found in results.items()}))
    print("\n".join(survivors) or "nothing wrong passes both")
    return 1 if survivors else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
