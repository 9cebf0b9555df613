"""What this machine is, as JSON: a process of its own, so that the program that starts the parts holds no GPU memory."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

from common import child_environment

from megatron_sp.utils.errors import ConfigError

_PATIENCE_S = 180.0


def probe() -> dict[str, str]:
    """Return versions, and the GPUs: ``gpus`` is their number.

    Raises:
        ConfigError: torch cannot be asked.
    """
    command = [sys.executable, "-m", "first_light.probe"]
    try:
        run = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"torch did not say within {_PATIENCE_S:.0f} s what is here: look at nvidia-smi, and at `megatron-sp doctor`"
        ) from None
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"torch cannot say what is here ({last[:300]}): see `megatron-sp doctor`")
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    environment = child_environment(1)
    environment["PYTHONPATH"] = ":".join([*sys.path[:1], *filter(None, sys.path[1:])])
    return environment


def main() -> int:
    """Print what ``probe`` returns."""
    import torch

    from megatron_sp import __version__

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {
        "gpus": str(count),
        "gpu": "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "megatron_sp": __version__,
    }
    if count:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found |= {
            "gpu": f"{count} x {torch.cuda.get_device_name()}, capability {capability}",
            "cuda": str(torch.version.cuda),
        }
        found |= {"cudnn": str(torch.backends.cudnn.version()), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
