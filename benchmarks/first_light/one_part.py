"""The process of one part: ``python -m first_light.one_part MODULE:FUNCTION DEVICE NUM_GPUS FOLDER``.

It writes ``FOLDER/records.jsonl``: a line for each record as soon as it is made, and at last {"end": "done"}, or why not.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from first_light.processes import end_with_parent
from first_light.records import Context, failure, to_stream


def main() -> int:
    """Run the part that the command line names."""
    function, device, num_gpus, folder = sys.argv[1:]
    end_with_parent(Path(folder))
    module, _, name = function.partition(":")
    with open(Path(folder) / "records.jsonl", "w", encoding="utf-8") as stream:
        context = Context("cuda" if device == "cuda" else "cpu", int(num_gpus), device == "cpu", to_stream(stream))
        try:
            getattr(importlib.import_module(module), name)(context)
            end, message = "done", ""
        except Exception as error:
            traceback.print_exc()
            end, message = "failed", failure(error)
        stream.write(json.dumps({"end": end, "message": message}) + "\n")
    return int(end != "done")


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
