"""Print a Kubernetes manifest with values and a command filled in, for ``kubectl apply -f -``.

    python scripts/kubernetes/render.py trainjob NODES=2 IMAGE=registry/megatron_sp:1 CLAIM=corpus -- pretrain_gpt.py FLAGS

``trainjob`` is for Kubeflow Trainer, ``pytorchjob`` for Training Operator. What stands after ``--`` is what
``scripts/launch.sh`` takes after the number of processes. Values without a default must be given; names with
lower-case or unknown letters are refused, except those that start with ENV_, which become environment variables of the
container: ENV_NCCL_IB_HCA=mlx5.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from string import Template
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DEFAULTS = {
    "NAME": "megatron-sp", "NAMESPACE": "default", "IMAGE": None, "ROOT": "/workspace/megatron_sp", "PYTHON": "python3",
    "NODES": "1", "GPUS": "8", "CPUS": "32", "MEMORY": "256Gi", "SHM": "64Gi", "CLAIM": None, "DATA": "/data",
    "RESTARTS": "20", "GRACE": "300",
}  # fmt: skip
_NUMBERS = {"NODES": 1, "GPUS": 1, "CPUS": 1, "RESTARTS": 0, "GRACE": 60}
_NAME = re.compile(
    r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
)  # with what the operators append it stays below the 63 characters of a label


class Refusal(Exception):
    """A message for the user."""


def values_from(words: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Read NAME=VALUE words.

    Returns:
        (values of the manifest, environment variables of the container).
    Raises:
        Refusal: an unknown name, a missing or impossible value.
    """
    given, environment = {}, {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not (name in DEFAULTS or re.fullmatch(r"ENV_\w+", name)):
            raise Refusal(
                f"{word!r} is not NAME=VALUE with one of {', '.join(DEFAULTS)}, or ENV_...; the command comes after --"
            )
        (environment if name.startswith("ENV_") else given)[name.removeprefix("ENV_")] = value
    values = {name: given.get(name, default) for name, default in DEFAULTS.items()}
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise Refusal(f"no value for {', '.join(missing)}: give {' '.join(f'{name}=...' for name in missing)}")
    for name, least in _NUMBERS.items():
        if not re.fullmatch(r"\d{1,6}", values[name]) or int(values[name]) < least:
            raise Refusal(f"{name}={values[name]} must be a number, {least} or more")
    if not _NAME.fullmatch(values["NAME"]):
        raise Refusal(f"NAME={values['NAME']} must be at most 40 small letters, digits and -, and begin with a letter")
    return values, environment


def render(kind: str, values: dict[str, str], environment: dict[str, str], command: list[str]) -> list[dict[str, Any]]:
    """Return the documents of a manifest.

    Args:
        kind: trainjob or pytorchjob.
        values: of the placeholders.
        environment: more variables of the container.
        command: script and flags.
    Raises:
        Refusal: there is no command.
    """
    if not command:
        raise Refusal("no command: after -- comes what to train, such as: -- pretrain_gpt.py --preset gpt-1.3b ...")
    script = command[0] if command[0].startswith(("-", "/")) else f"{values['ROOT']}/{command[0]}"
    environment = {
        "PYTHON": values["PYTHON"],
        "JOB_ID": values["NAME"],  # the same in all attempts: a restarted pod knows the lock of the one before it
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(values["GRACE"]) - 30),  # torchrun's patience ends before Kubernetes'
        **({"RESTART_CODE": "143"} if kind == "pytorchjob" else {}),
        **environment,
    }
    filled = Template((HERE / f"{kind}.yaml").read_text(encoding="utf-8")).substitute(
        values,
        ARGS=json.dumps([script, *command[1:]]),
        ENV=json.dumps([{"name": name, "value": value} for name, value in environment.items()]),
        WORKERS=int(values["NODES"]) - 1,
    )
    documents = list(yaml.safe_load_all(filled))
    if kind == "pytorchjob" and values["NODES"] == "1":
        del documents[0]["spec"]["pytorchReplicaSpecs"]["Worker"]
    return documents


class _Plain(yaml.SafeDumper):
    """Writes a template that is used twice twice, not as an anchor and its alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main(words: list[str]) -> int:
    """Print the manifest; return the exit code."""
    before = words[: words.index("--")] if "--" in words else words
    command = words[len(before) + 1 :]
    try:
        if not before:
            raise Refusal("usage: render.py trainjob|pytorchjob NAME=VALUE ... -- SCRIPT [FLAGS]")
        if before[0] not in (
            "trainjob",
            "pytorchjob",
        ):  # before the values: one who has no manifest yet has none of those
            raise Refusal(f"{before[0]!r} is neither trainjob (Kubeflow Trainer) nor pytorchjob (Training Operator)")
        documents = render(before[0], *values_from(before[1:]), command)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    print(yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=140), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
