"""Model of a command: built from a config.json (data only), or by a function that the user names (code)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError, ReportedError

MAX_CONFIG_BYTES = 4 * 1024 * 1024
Batch = dict[str, Any]


def from_folder(folder: str, class_name: str | None, settings: Sequence[str], *, meta: bool) -> nn.Module:
    """Build a model of transformers with random weights, or on the meta device.

    Args:
        folder: folder with a config.json, or the path of that file.
        class_name: class of transformers; None: the first of ``architectures``.
        settings: KEY=VALUE to override, with VALUE in JSON or as a plain string.
        meta: build the model on the meta device, without memory for its weights.
    Raises:
        ConfigError: the file is missing or invalid, the model is not one of transformers' own, or it has no such
            setting.
    """
    data = _read(folder)
    config = _config(data, folder)
    for setting in settings:
        _set(config, setting)
    cls = _class(class_name or next(iter(data.get("architectures") or []), None), folder)
    try:
        with torch.device("meta") if meta else nullcontext():
            return cls(config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"{folder}: {cls.__name__} cannot be made of its config.json: {error}") from None


def _transformers() -> ModuleType:
    try:
        return availability.load("transformers")
    except RuntimeError as error:
        raise ConfigError(
            f"--model needs transformers, and {error}: pip install -e '.[hf]', or take --factory"
        ) from None


def _read(folder: str) -> dict[str, Any]:
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--model {folder}: {path} cannot be read: {error.strerror}; it is a folder on this machine"
        ) from None
    try:
        data = json.loads(raw) if len(raw) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not the config.json of a model: an object in JSON")
    return data


def _config(data: dict[str, Any], folder: str) -> Any:
    known = _transformers().CONFIG_MAPPING
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"{folder}: model_type {model_type!r} is none of transformers' own; code that comes with a model is never run: take --factory"
        )
    clean = {key: value for key, value in data.items() if key not in ("auto_map", "quantization_config")}
    try:
        return known[model_type].from_dict(clean)
    except Exception as error:  # transformers raises exception classes of its own for what it rejects
        raise ConfigError(f"{folder}: config.json is no {model_type}'s: {error}") from None


def _set(config: Any, setting: str) -> None:
    key, sign, value = setting.partition("=")
    if not sign or not hasattr(config, key) or key.startswith("_") or callable(getattr(config, key)):
        raise ConfigError(f"--set {setting}: want KEY=VALUE, with a KEY of config.json")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    try:
        setattr(config, key, parsed)
    except Exception as error:
        raise ConfigError(f"--set {setting}: {error}") from None


def _class(name: str | None, folder: str) -> Callable[[Any], nn.Module]:
    library = _transformers()
    found = getattr(library, name, None) if name and name.isidentifier() else None
    if not (inspect.isclass(found) and issubclass(found, library.PreTrainedModel)):
        what = f"{name!r} is not a model of transformers" if name else "config.json names no class (architectures)"
        raise ConfigError(f"{folder}: {what}: name one with --class, such as LlamaForCausalLM")
    return cast(Callable[[Any], nn.Module], found)


def from_factory(name: str) -> tuple[nn.Module, Batch | None]:
    """Build a model by calling the user's ``module:function`` or ``file.py:function``.

    Raises:
        ConfigError: there is no such module or function, it raises, or it returns something else.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise ConfigError(f"--factory {name}: want MODULE:FUNCTION or FILE.py:FUNCTION")
    made = getattr(_module(place, name), function, None)
    if not callable(made):
        raise ConfigError(f"--factory {name}: {place} has no function {function}")
    try:
        result = made()
    except ReportedError:
        raise
    except Exception as error:
        raise ConfigError(f"--factory {name}: {_told(error, made)}") from error
    model, batch = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module) or not (batch is None or isinstance(batch, dict)):
        raise ConfigError(
            f"--factory {name} must return a model, or (model, dict of keyword arguments), and returned {type(result).__name__}"
        )
    return model, batch


def _module(place: str, name: str) -> ModuleType:
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not os.path.isfile(place):
            raise ConfigError(f"--factory {name}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"--factory {name}: {_told(error)}") from error
        return module
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--factory {name}: {error}; modules are looked for from here and among installed packages"
        ) from None
    except Exception as error:
        raise ConfigError(f"--factory {name}: {_told(error)}") from error


def _told(error: Exception, made: Callable[[], Any] | None = None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = (
        f"{error.filename}:{error.lineno}"
        if isinstance(error, SyntaxError)
        else f"{frames[-1].filename}:{frames[-1].lineno}"
    )
    what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    return f"{'the file fails' if made is None else 'the function fails'} at {place}: {what}"
