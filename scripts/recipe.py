"""Called by scripts/pretrain_*.sh: checks a script's variables and flags, tells what they come to, and hands over to scripts/launch.sh."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp.training.recipe_run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
