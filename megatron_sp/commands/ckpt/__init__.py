"""Flags of ``megatron-sp ckpt``; each action is imported only when it is used."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_sp.utils.entry_point import integer

_STEP_OR_RUN = "one step folder, or a run: then its newest step"


def add_actions(ckpt: argparse.ArgumentParser) -> None:
    """Add a subcommand for each action."""
    actions = ckpt.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        parser.set_defaults(run=_run, action=name)
        return parser

    def add_step(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path", type=Path, metavar="STEP|RUN", help=_STEP_OR_RUN)
        parser.add_argument(
            "--ckpt-step", type=integer(), metavar="N", help="this step of the run instead of the newest"
        )

    ls = action(
        "ls", "list checkpoints: what they hold, whether they are complete, what was left over, what a resume takes"
    )
    ls.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN", help="runs, folders of runs, checkpoints folders, or step folders"
    )
    ls.add_argument("--json", dest="as_json", action="store_true", help="print everything as JSON")

    show = action("show", "what one checkpoint holds: model, progress, schedule, flags, versions, tensors")
    add_step(show)
    show.add_argument(
        "--tensors", nargs="?", const="*", metavar="GLOB", help="list the tensors, or those whose names match"
    )
    of_values = "smallest, largest, mean, ... of a tensor (name or GLOB; repeatable)"
    show.add_argument("--values", action="append", default=[], metavar="NAME", help=of_values)
    show.add_argument("--json", dest="as_json", action="store_true", help="print everything as JSON")

    verify = action(
        "verify",
        "compare a checkpoint byte for byte with its manifest and list everything wrong; exit code 3 if anything is",
    )
    add_step(verify)
    verify.add_argument("--all", dest="every", action="store_true", help="every step of the run, not only its newest")
    of_tensors = "tensors too: complete, of the configuration's shapes, finite; optimizer state for each weight"
    verify.add_argument("--deep", action="store_true", help=of_tensors)

    diff = action(
        "diff", "compare two checkpoints, of any layouts: state, flags, tensors, values; exit code 1 if they differ"
    )
    diff.add_argument("a", type=Path, metavar="A", help=_STEP_OR_RUN)
    diff.add_argument("b", type=Path, metavar="B", help=_STEP_OR_RUN)
    diff.add_argument(
        "--tensors", nargs="?", const="*", metavar="GLOB", help="compare tensors alone, or those whose names match"
    )
    diff.add_argument("--weights-only", action="store_true", help="leave the optimizer's tensors out")
    diff.add_argument(
        "--rtol", type=float, metavar="X", help="values a and b are the same if |a-b| <= atol + rtol*|b| (default: 0)"
    )
    diff.add_argument("--atol", type=float, metavar="X", help="see --rtol (default: 0); with either, dtypes may differ")
    diff.add_argument("--json", dest="as_json", action="store_true", help="print everything as JSON")

    prune = action("prune", "delete old checkpoints of a run that no job is writing to")
    prune.add_argument("path", type=Path, metavar="RUN")
    prune.add_argument(
        "--keep-last",
        type=integer(),
        metavar="N",
        help="keep the newest N sound checkpoints; each is read byte for byte",
    )
    prune.add_argument(
        "--keep-every", type=integer(), metavar="K", help="also keep every step that is a multiple of this"
    )
    prune.add_argument("--leftovers", action="store_true", help="delete unfinished and set-aside folders, too")
    prune.add_argument("--dry-run", action="store_true", help="only list what would be deleted")

    merge = action("merge", "rewrite a checkpoint as one of a single process: few files, the same bits")
    add_step(merge)
    merge.add_argument("--output", type=Path, required=True, metavar="DIR", help="run folder to make (required)")
    merge.add_argument("--weights-only", action="store_true", help="leave the optimizer's tensors out")
    merge.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="with --weights-only: convert the weights")
    merge.add_argument(
        "--allow-non-finite", action="store_true", help="write tensors with NaN or infinities in them, too"
    )


def _run(args: argparse.Namespace) -> int:
    flags: dict[str, Any] = {
        name: value for name, value in vars(args).items() if name not in ("run", "action", "words")
    }
    if args.action in ("show", "diff"):
        from megatron_sp.commands.ckpt import contents

        return (contents.show if args.action == "show" else contents.diff)(**flags)
    from megatron_sp.commands.ckpt import folders

    if args.action == "merge" or flags.get("deep"):
        from megatron_sp.commands.ckpt import tensors

        if args.action == "merge":
            return tensors.merge(**flags)
        return folders.verify(**flags | {"deep": tensors.deep_problems})
    if args.action == "verify":
        return folders.verify(**flags | {"deep": None})
    return folders.ls(**flags) if args.action == "ls" else folders.prune(**flags)
