"""Pretraining from a command line."""

# Nothing imports torch or numpy until the configuration is valid: a wrong flag is reported in a tenth of a second,
# before any communication.

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_sp.config.flags.arguments import config_as_yaml, read_request
from megatron_sp.config.schema import Config
from megatron_sp.utils import streams
from megatron_sp.utils.entry_point import require_address_space, require_torch
from megatron_sp.utils.errors import EXIT_CONFIG, EXIT_OK, ReportedError
from megatron_sp.utils.launch import Launch, is_first_rank, let_first_rank_speak


def main(argv: Sequence[str] | None = None, prog: str = "megatron-sp pretrain") -> NoReturn:
    """Pretrain what the first word names, and end the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    programs = {"gpt": pretrain_gpt, "bert": pretrain_bert}
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: {prog} {{gpt,bert}} [FLAGS]\n\nPretrain a GPT or a BERT; every flag: {prog} gpt --help")
        raise SystemExit(EXIT_OK)
    if not words or words[0] not in programs:
        found = f", not {words[0]!r}" if words else ""
        print(f"error: the first word must be gpt or bert{found}: {prog} gpt --help", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG)
    programs[words[0]](words[1:], f"{prog} {words[0]}")


def pretrain_gpt(argv: Sequence[str] | None = None, prog: str | None = None) -> NoReturn:
    """Pretrain a GPT and end the process."""
    config = parse_config(argv, prog=prog, description="Pretrain a GPT model.", family="gpt")
    from megatron_sp.tasks.gpt import GPT
    from megatron_sp.training.loop import pretrain

    pretrain(config, GPT)


def pretrain_bert(argv: Sequence[str] | None = None, prog: str | None = None) -> NoReturn:
    """Pretrain a BERT and end the process."""
    config = parse_config(argv, prog=prog, description="Pretrain a BERT model.", family="bert")
    from megatron_sp.tasks.bert import bert_task
    from megatron_sp.training.loop import pretrain

    pretrain(config, bert_task(config))


def parse_config(
    argv: Sequence[str] | None = None, *, prog: str | None = None, description: str = "", world_size: int | None = None,
    family: str | None = None,
) -> Config:  # fmt: skip
    """Return the validated configuration of a run; or print an answer or a message, on rank 0, and exit.

    ``family`` is "gpt" or "bert"; None: --model-family says it. ``world_size``: by default what the launcher started.
    """
    words = sys.argv[1:] if argv is None else argv
    name, speaks = prog or os.path.basename(sys.argv[0]), is_first_rank()
    with streams.checked():
        try:
            request, answer = read_request(words, world_size=world_size, family=family), ""
            if request.action == "print-config" and request.config is not None:
                answer = config_as_yaml(request.config)
            elif request.action == "dry-run" and request.config is not None:
                from megatron_sp.planner.dry_run import dry_run

                answer = dry_run(request.config, request.world_size, request.dry_run) + "\n"
            elif request.action == "run":
                Launch.from_env()  # its errors come before torch is loaded
                require_address_space()
                require_torch()
        except ReportedError as error:
            if speaks or not error.on_all_ranks:
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                let_first_rank_speak()
            raise SystemExit(error.exit_code) from None
        if request.action == "run":
            assert request.config is not None
            return request.config
        if speaks and request.action == "help":
            from megatron_sp.config.flags.flag_help import print_help

            print_help(name, description)
        elif speaks:
            print(answer, end="")
        raise SystemExit(EXIT_OK)
