"""Flags of ``megatron-sp ckpt``; each action is imported only when it is used."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_sp.utils.program import integer

_STEP_OR_RUN = "one step folder, or a run: then its newest step"


def add_actions(ckpt: argparse.ArgumentParser) -> None:
    """Add a subcommand for each action."""
    actions = ckpt.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_ls(actions)
    _add_show(actions)
    _add_verify(actions)
    _add_diff(actions)
    _add_prune(actions)
    _add_merge(actions)


def _action(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="STEP|RUN", help=_STEP_OR_RUN)
    parser.add_argument("--ckpt-step", type=integer(), metavar="N", help="this step of the run instead of the newest")


def _add_ls(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "ls", "list checkpoints: what they hold, whether they are complete, what was left over, what a resume takes")
    parser.add_argument("paths", type=Path, nargs="+", metavar="RUN", help="runs, folders of runs, checkpoints folders, or step folders")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=_ls)


def _add_show(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "show", "what one checkpoint holds: model, progress, schedule, flags, versions, tensors")
    _add_step(parser)
    parser.add_argument("--tensors", nargs="?", const="*", metavar="GLOB", help="list the tensors, or those whose names match")
    parser.add_argument(
        "--values",
        action="append",
        default=[],
        metavar="NAME",
        help="smallest, largest, mean, ... of a tensor (name or GLOB; repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=_show)


def _add_verify(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(
        actions, "verify", "compare a checkpoint byte for byte with its manifest and list everything wrong; exit code 3 if anything is"
    )
    _add_step(parser)
    parser.add_argument("--all", action="store_true", help="every step of the run, not only its newest")
    parser.add_argument(
        "--deep", action="store_true", help="tensors too: complete, of the configuration's shapes, finite; optimizer state for each weight"
    )
    parser.set_defaults(run=_verify)


def _add_diff(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "diff", "compare two checkpoints, of any layouts: state, flags, tensors, values; exit code 1 if they differ")
    parser.add_argument("a", type=Path, metavar="A", help=_STEP_OR_RUN)
    parser.add_argument("b", type=Path, metavar="B", help=_STEP_OR_RUN)
    parser.add_argument("--tensors", nargs="?", const="*", metavar="GLOB", help="compare tensors alone, or those whose names match")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's tensors out")
    parser.add_argument("--rtol", type=float, metavar="X", help="values a and b are the same if |a-b| <= atol + rtol*|b| (default: 0)")
    parser.add_argument("--atol", type=float, metavar="X", help="see --rtol (default: 0); with either, dtypes may differ")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=_diff)


def _add_prune(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "prune", "delete old checkpoints of a run that no job is writing to")
    parser.add_argument("path", type=Path, metavar="RUN")
    parser.add_argument("--keep-last", type=integer(), metavar="N", help="keep the newest N sound checkpoints; each is read byte for byte")
    parser.add_argument("--keep-every", type=integer(), metavar="K", help="also keep every step that is a multiple of this")
    parser.add_argument("--leftovers", action="store_true", help="delete unfinished and set-aside folders, too")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    parser.set_defaults(run=_prune)


def _add_merge(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _action(actions, "merge", "rewrite a checkpoint as one of a single process: few files, the same bits")
    _add_step(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="run folder to make (required)")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's tensors out")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="with --weights-only: convert the weights")
    parser.add_argument("--allow-non-finite", action="store_true", help="write tensors with NaN or infinities in them, too")
    parser.set_defaults(run=_merge)


def _ls(args: argparse.Namespace) -> int:
    from megatron_sp.commands.ckpt import ls

    return ls.run(args.paths, as_json=args.json)


def _show(args: argparse.Namespace) -> int:
    from megatron_sp.commands.ckpt import show

    return show.run(args.path, args.ckpt_step, tensors=args.tensors, values=args.values, as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    from megatron_sp.commands.ckpt import verify

    return verify.run(args.path, args.ckpt_step, every=args.all, deep=args.deep)


def _diff(args: argparse.Namespace) -> int:
    from megatron_sp.commands.ckpt import diff

    return diff.run(
        args.a, args.b, tensors=args.tensors, weights_only=args.weights_only, rtol=args.rtol, atol=args.atol, as_json=args.json
    )  # fmt: skip


def _prune(args: argparse.Namespace) -> int:
    from megatron_sp.commands.ckpt import prune

    return prune.run(
        args.path, keep_last=args.keep_last, keep_every=args.keep_every, leftovers=args.leftovers, dry_run=args.dry_run
    )  # fmt: skip


def _merge(args: argparse.Namespace) -> int:
    from megatron_sp.commands.ckpt import merge

    return merge.run(
        args.path, args.ckpt_step, args.output, weights_only=args.weights_only, dtype=args.dtype, allow_non_finite=args.allow_non_finite
    )
