"""Called by scripts/pretrain_*.sh: checks a script's variables and flags, tells what they come to, and hands over to scripts/launch.sh."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp.commands.recipe import main
from megatron_sp.utils import output
from megatron_sp.utils.entry_point import leave

if __name__ == "__main__":
    output.survive()  # a training is not left undone because nobody takes what is said of it
    leave(main(sys.argv[1:]))
