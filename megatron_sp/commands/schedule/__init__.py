"""Flags of ``megatron-sp schedule``: schedules of external models. Each action is imported only when it is used."""

from __future__ import annotations

import argparse

from megatron_sp.commands.schedule.train import LONG
from megatron_sp.utils.entry_point import integer


def add_actions(schedule: argparse.ArgumentParser) -> None:
    """Add a subcommand for each action."""
    actions = schedule.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}."
        parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
        parser.set_defaults(run=_run, action=name)
        return parser

    # fmt: off
    _add_model(action("check", "look at the lines alone, without a job: paths, sizes, heads; `verify` proves them; exit"
                               " code 2 if they cannot be"))
    show = action("show", "the model's tree: what is split and how, where ranks talk")
    _add_model(show)
    show.add_argument("--every", action="store_true", help="include modules that the schedule does not touch")
    show.add_argument("--html", metavar="FILE", help="write a picture of it, as one HTML file")
    show.add_argument("--save", metavar="FILE", help="write the lines as a plan, such as those of a preset")
    show.add_argument("--cost", type=integer(), nargs=2, metavar=("ROWS", "TOKENS"),
                      help="also the bytes a rank holds, and sends in a step")
    explain = action("explain", "details of some modules: shares of parameters, and why each collective is there")
    _add_model(explain)
    explain.add_argument("path", metavar="PATH", help="module, or a glob of several")
    verify = action("verify", "compare a step of the split model with the whole one, every gradient, in fp64; exit code"
                              " 5 if they differ")
    _add_model(verify)
    verify.add_argument("--batch", type=_positive, default=2, metavar="ROWS", help="of the batch (default: 2)")
    verify.add_argument("--seq", type=_positive, default=16, metavar="TOKENS", help="in a row (default: 16)")
    verify.add_argument("--seed", type=integer(2**63 - 1), default=1234, help="of weights and batch (default: 1234)")

    train = action("train", "train a transformers model from a local folder; start it with torchrun -m megatron_sp;"
                            " other flags: those of pretrain_gpt.py")
    train.add_argument("plan", metavar="PLAN", help="plan.yaml; `auto`: the preset of the model's family; your own"
                                                    " MODULE:FUNCTION, which gets (schedule, seq)")
    train.add_argument("--model", metavar="FOLDER", required=True,
                       help="folder with a config.json, and weights if there are any")
    train.add_argument("--task", choices=("next", "masked"), default="next",
                       help="predict the next token, or masked ones (default: next)")
    for axis, flag in LONG.items():
        train.add_argument(f"--{axis}", type=integer(2**16), metavar="N", help=f"same as --{flag}")
    train.set_defaults(takes_words=True)
    # fmt: on


def _add_model(parser: argparse.ArgumentParser) -> None:
    # the plan, the model and the layout, for all actions but ``train``
    add = parser.add_argument
    # fmt: off
    add("plan", metavar="PLAN", help="file of a schedule (plan.yaml), or `auto`: the preset of the model's family")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="FOLDER", help="folder with a config.json of transformers; the model is made"
                        " from it, nothing is fetched and no code in it is run")
    source.add_argument("--factory", metavar="MODULE:FUNCTION", help="function of yours that returns the model, or"
                        " (model, batch of keyword arguments); a file.py instead of a module works too")
    add("--class", dest="class_name", metavar="NAME", help="class of transformers (default: what config.json says)")
    add("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="change config.json: --set num_hidden_layers=2")
    for axis, what in (
        ("tp", "ranks that share the weights"), ("sp", "that share sequences (Ulysses)"),
        ("cp", "that share sequences (keys and values)"), ("dp", "that share the batch"),
    ):
        add(f"--{axis}", type=_positive, default=1, metavar="N", help=f"{what} (default: 1)")
    add("--seq-parallel", action="store_true", help="of `auto`: cut activations between layers over tp, too")
    add("--json", action="store_true", help="print JSON")
    # fmt: on


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _run(args: argparse.Namespace) -> int:
    if args.action == "train":
        from megatron_sp.commands.schedule import train

        return train.run(args)
    from megatron_sp.commands.schedule import actions

    return actions.run(args)
