"""``scripts/first_light.sh`` with other parts and without torch: the words after the first are its flags; that one names the parts."""

from __future__ import annotations

import sys
from functools import partial

from first_light import command, plan
from first_light.runner import Runner

from megatron_sp.utils.entry_point import run_program
from support.first_light_parts import part


def main() -> int:
    """Run the parts that the first word names, with commas between them."""
    parts = tuple(part(name) for name in sys.argv[1].split(","))
    command.PARTS = plan.PARTS = parts  # type: ignore[misc]
    command.Runner = partial(Runner, grace_s=0.1)  # type: ignore[misc,assignment]
    command.probe = lambda: {"gpus": "0", "torch": "none", "python": "3", "megatron_sp": "0"}
    return command.main(sys.argv[2:])


if __name__ == "__main__":
    run_program(main)
