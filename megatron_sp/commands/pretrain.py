"""From the command line of a training program to its configuration, or to the answer of --help, --print-config or --dry-run.

Nothing here imports torch or numpy: a wrong flag is answered in a tenth of a second, before any rank talks to another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_sp.config.flags.arguments import Request, config_as_yaml, read_request
from megatron_sp.config.schema import Config
from megatron_sp.utils import output
from megatron_sp.utils.address_space import require_address_space
from megatron_sp.utils.errors import EXIT_OK, ReportedError


def parse_config(
    argv: Sequence[str] | None = None, *, prog: str | None = None, description: str = "", world_size: int | None = None,
    family: str | None = None,
) -> Config:  # fmt: skip
    """The configuration of this run, for an entry point: prints and exits by itself, like argparse.

    Args:
        argv: the words after the program's name (default: this process's).
        prog: the program's name in messages (default: this process's).
        description: what --help says first.
        world_size: number of processes (default: torchrun's WORLD_SIZE, else 1).
        family: of the models that the program trains, "gpt" or "bert"; None: whatever --model-family says.
    Returns:
        A normalised and validated configuration; ``ignored_flags`` lists what was accepted without a meaning.
    Raises:
        SystemExit: 0 after --help, --print-config or --dry-run, 2 after a message about a wrong flag (other errors of a --dry-run have
            their own codes; so has an answer that could not be written). Only rank 0 prints.
    """
    words = sys.argv[1:] if argv is None else argv
    name = prog or os.path.basename(sys.argv[0])
    speaks = os.environ.get("RANK", "0") == "0"
    with output.checked():
        try:
            request = read_request(words, world_size=world_size, family=family)
            answer = "" if request.action == "help" else _answer(request)
        except ReportedError as error:
            if speaks:
                print(f"{name}: {error}", file=sys.stderr)
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


def _answer(request: Request) -> str:
    """The text that answers a question; empty for a run. Raises ReportedError."""
    assert request.config is not None
    if request.action == "print-config":
        return config_as_yaml(request.config)
    if request.action == "dry-run":
        from megatron_sp.planner.dry_run import dry_run

        return dry_run(request.config, request.world_size, request.dry_run) + "\n"
    require_address_space()
    return ""
