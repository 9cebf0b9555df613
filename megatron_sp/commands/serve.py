"""Serve a trained GPT: OpenAI's completions API over HTTP, on this machine only unless told otherwise.

    megatron-sp serve --load runs/quickstart/gpt
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "The for \
statement", "max_tokens": 30}'
    bash scripts/launch.sh 2 tools/serve.py --load runs/quickstart/gpt --tensor-model-parallel-size 2

Concurrent requests are batched. There is no encryption, and without --api-key no authentication: docs/how-to/serve.md.
Ctrl-C or SIGTERM ends the server once its pending requests are answered.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_sp.config.flags.inference_flags import add_graph_flag, add_model_flags
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.utils.launch import Launch

KEY_VARIABLE = "MEGATRON_SP_API_KEY"
INSTEAD = {
    "BERT": "which cannot continue a text: use megatron-sp fill-mask to fill in masked words",
    "classifier": "which classifies texts and generates none",
}


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Serve the model of a command line; return the exit code."""
    parser = documented_parser(prog, __doc__)
    add_graph_flag(add_model_flags(parser))
    # fmt: off
    add = parser.add_argument_group("door").add_argument
    add("--host", default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, programs on this machine only)")
    add("--port", type=integer(), default=8000, help="0: any that is free; the log says which (default: 8000)")
    add("--api-key", metavar="KEY",
        help=f"clients must send it as a bearer token; better in the environment, as {KEY_VARIABLE}")
    add("--served-model-name", metavar="NAME",
        help="what clients call the model (default: the name of the run's folder)")
    add = parser.add_argument_group("limits").add_argument
    add("--max-batch-size", type=integer(2**16), default=8, metavar="N",
        help="choices generated at once (default: 8)")
    add("--max-queue", type=integer(10**6), default=64, metavar="N",
        help="choices that may wait; beyond them: 429 (default: 64)")
    add("--max-tokens", type=integer(), metavar="N",
        help="generated for one choice, at most (default: the model's context)")
    add("--max-body-bytes", type=integer(), default=1 << 20, metavar="N", help="of a request (default: 1 MiB)")
    add("--request-timeout", type=float, default=300.0, metavar="S",
        help="seconds from a request's arrival to its last token; then 504 (default: 300)")
    add("--shutdown-timeout", type=float, default=20.0, metavar="S",
        help="seconds that requests have to finish after SIGTERM; then 503 (default: 20)")
    # fmt: on
    options = parser.parse_args(argv)
    from megatron_sp.inference.team import run_tool

    return run_tool(lambda launch: _run(options, launch))


def _check(options: argparse.Namespace) -> None:
    from megatron_sp.inference.serving.server import require_packages

    least = {"max_batch_size": 1, "max_queue": 0, "max_body_bytes": 1, "max_tokens": 1, "port": 0}
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} ({value}) must be at least {low}")
    for name in ("request_timeout", "shutdown_timeout"):
        seconds = getattr(options, name)
        if not 0 < seconds < 1e6:
            raise ConfigError(f"--{name.replace('_', '-')} ({seconds}) must be a number of seconds above 0")
    if options.port > 65535:
        raise ConfigError(f"--port ({options.port}) must be at most 65535")
    require_packages()


def _run(options: argparse.Namespace, launch: Launch) -> None:
    # rank 0 serves, the others compute with it
    from megatron_sp.inference import team as inference
    from megatron_sp.inference.decoder import Decoder
    from megatron_sp.inference.serving.engine import Engine, follow
    from megatron_sp.inference.serving.request import Limits
    from megatron_sp.inference.serving.server import Api, is_loopback, open_socket, serve, warning_about
    from megatron_sp.models.gpt import GPTModel

    _check(options)
    inference.check_layout(options, launch.world_size, copies=False)
    inference.check_graphs(options)
    team = inference.join(options, launch)
    door = None
    with team.agree():  # before the model is loaded: a port that is taken is said at once
        if team.rank == 0:
            door = open_socket(options.host, options.port)
    loaded = inference.load(options, team, GPTModel, "GPT", INSTEAD)
    team.say(loaded.description)
    model, tokenizer = cast("GPTModel", loaded.model), loaded.stored.tokenizer
    positions, capture = model.config.max_positions, inference.capture(options, team, model.config)
    decoder = Decoder(model, options.max_batch_size, tokenizer.vocab_size, capture=capture)
    decoder.reserve(positions)
    if door is None:
        # rank 0 gets the signal too, finishes the requests in progress, and tells the others when to stop
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(decoder, lambda: cast("list[object]", team.broadcast(None)))
        return
    tell = team.broadcast if team.size > 1 else None
    engine = Engine(decoder, tokenizer, options.max_queue, options.request_timeout, tell)
    key = options.api_key or os.environ.get(KEY_VARIABLE) or None
    limits = Limits(positions, min(options.max_tokens or positions, positions), engine.capacity)
    path = Path(options.load).resolve()
    names = (p.name for p in (path, *path.parents) if p.name != "checkpoints" and not p.name.startswith("step-"))
    name = options.served_model_name or next(names, "model")
    api = Api(engine, tokenizer, name, limits, options.max_body_bytes, key, is_loopback(options.host))
    if warning := warning_about(options.host, has_key=key is not None):
        team.say(warning)
    host, port = door.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    ready = f"serving '{api.model_name}' at {url}/v1/completions"
    serve(api, door, options.shutdown_timeout, lambda: team.say(ready))
    if engine.broken:
        raise PeerError(engine.broken)
    team.say("stopped")
