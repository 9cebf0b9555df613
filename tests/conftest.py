"""Shared set-up: warm imports before any fork, so that a test on four ranks takes a tenth of a second."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.testing.assert_close(torch.ones(1), torch.ones(1))
torch.set_num_threads(1)
