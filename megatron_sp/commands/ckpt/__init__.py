"""Flags of ``megatron-sp ckpt``; each action is imported only when it is used."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_sp.utils.entry_point import integer


def add_actions(ckpt: argparse.ArgumentParser) -> None:
    """Add a subcommand for each action."""
    actions = ckpt.add_subparsers(title="actions", metavar="ACTION", required=True)
    step_or_run = "one step folder, or a run: then its newest step"

    def action(name: str, text: str, has_step: bool = False) -> Any:
        parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.set_defaults(run=_run, action=name)
        if has_step:
            parser.add_argument("path", type=Path, metavar="STEP|RUN", help=step_or_run)
            text = "this step of the run instead of the newest"
            parser.add_argument("--ckpt-step", type=integer(), metavar="N", help=text)
        return parser.add_argument

    # fmt: off
    add = action("ls", "list checkpoints: what they hold, whether they are complete, what was left over, what a resume"
                       " takes")
    add("paths", type=Path, nargs="+", metavar="RUN",
        help="runs, folders of runs, checkpoints folders, or step folders")
    add("--json", dest="as_json", action="store_true", help="print everything as JSON")

    add = action("show", "what one checkpoint holds: model, progress, schedule, flags, versions, tensors", True)
    add("--tensors", nargs="?", const="*", metavar="GLOB", help="list the tensors, or those whose names match")
    add("--values", action="append", default=[], metavar="NAME",
        help="smallest, largest, mean, ... of a tensor (name or GLOB; repeatable)")
    add("--json", dest="as_json", action="store_true", help="print everything as JSON")

    add = action("verify", "compare a checkpoint byte for byte with its manifest and list everything wrong; exit code 3"
                           " if anything is", True)
    add("--all", dest="every", action="store_true", help="every step of the run, not only its newest")
    add("--deep", action="store_true", help="tensors too: complete, of the configuration's shapes, finite; optimizer"
                                            " state for each weight")

    add = action("diff", "compare two checkpoints, of any layouts: state, flags, tensors, values; exit code 1 if they"
                         " differ")
    add("a", type=Path, metavar="A", help=step_or_run)
    add("b", type=Path, metavar="B", help=step_or_run)
    add("--tensors", nargs="?", const="*", metavar="GLOB", help="compare tensors alone, or those whose names match")
    add("--weights-only", action="store_true", help="leave the optimizer's tensors out")
    add("--rtol", type=float, metavar="X",
        help="values a and b are the same if |a-b| <= atol + rtol*|b| (default: 0)")
    add("--atol", type=float, metavar="X", help="see --rtol (default: 0); with either, dtypes may differ")
    add("--json", dest="as_json", action="store_true", help="print everything as JSON")

    add = action("prune", "delete old checkpoints of a run that no job is writing to")
    add("path", type=Path, metavar="RUN")
    add("--keep-last", type=integer(), metavar="N",
        help="keep the newest N sound checkpoints; each is read byte for byte")
    add("--keep-every", type=integer(), metavar="K", help="also keep every step that is a multiple of this")
    add("--leftovers", action="store_true", help="delete unfinished and set-aside folders, too")
    add("--dry-run", action="store_true", help="only list what would be deleted")

    add = action("merge", "rewrite a checkpoint as one of a single process: few files, the same bits", True)
    add("--output", type=Path, required=True, metavar="DIR", help="run folder to make (required)")
    add("--weights-only", action="store_true", help="leave the optimizer's tensors out")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="with --weights-only: convert the weights")
    add("--allow-non-finite", action="store_true", help="write tensors with NaN or infinities in them, too")
    # fmt: on


def _run(args: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(args).items() if name not in ("run", "action", "words")}
    if args.action in ("show", "diff"):
        from megatron_sp.commands.ckpt import contents

        return int(getattr(contents, args.action)(**flags))
    if args.action == "merge":
        from megatron_sp.commands.ckpt import tensors

        return tensors.merge(**flags)
    from megatron_sp.commands.ckpt import folders

    if args.action == "verify":
        if flags.pop("deep"):
            from megatron_sp.commands.ckpt.tensors import deep_problems

            return folders.verify(**flags, deep=deep_problems)
        return folders.verify(**flags, deep=None)
    return int(getattr(folders, args.action)(**flags))
