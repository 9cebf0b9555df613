"""``hf``: a folder with config.json, safetensors files and a tokenizer, as ``save_pretrained`` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint import safetensors_file as safetensors
from megatron_sp.checkpoint.pieces import Piece
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert import tokenizers
from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile, require_dtype
from megatron_sp.convert.copies import Correspondence, Gathered, Index, LastRead, Scattered, Store, TensorInfo

from megatron_sp.convert.copies import TensorStore  # isort: skip
from megatron_sp.convert.families import family_for, family_named
from megatron_sp.convert.families.family import ROTARY, Family, Settings, Tensors
from megatron_sp.convert.model import Model, Options, Progress, match_tensors, parameter_shapes, require_sound
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import fsync_dir, write_synced
from megatron_sp.utils.strict_json import open_regular, parse_object, read_small_file

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
BIN_INDEX, BIN = "pytorch_model.bin.index.json", "pytorch_model.bin"
_MAX_INDEX_BYTES, _MAX_INDEX_VALUES = 8 << 20, 100_000
_MAX_CONFIG_BYTES, _MAX_CONFIG_VALUES = 1 << 20, 50_000  # it is kept in checkpoints, for the way back
_WORDS, _TYPES = "bert.embeddings.word_embeddings.weight", "bert.embeddings.token_type_embeddings.weight"
_DTYPES = "hf_dtypes"  # the tensors' own dtypes, which config.json may contradict
Contents = Iterator[tuple[str, TensorInfo, Callable[[], Tensor]]]  # of a file: name, description, what reads it


class HuggingFace:
    """Folders of transformers: config.json and safetensors (or old ``.bin``) files."""

    name, holds_optimizer = "hf", False

    def recognises(self, path: Path) -> bool:
        return (path / CONFIG).exists() and not (path / "latest").exists()

    def read(self, path: Path, options: Options) -> Model:
        data = read_small_file(path / CONFIG, _MAX_CONFIG_BYTES)
        document = parse_object(data, str(path / CONFIG), _MAX_CONFIG_VALUES)
        family = family_named(document, path / CONFIG)
        store, shown = renamed(_open(path), family)
        shapes = {name: info.shape for name, info in store.tensors().items()}
        config = family.config(Settings(document, str(path / CONFIG)), shapes)
        num_classes = next(iter(shapes.get("classifier.weight", ())), 0) if config.is_bert else 0
        require_sound(config, len(shapes), str(path / CONFIG))
        types = store.tensors().get(_TYPES) if config.is_bert and config.token_types == 1 else None
        if types is not None and types.shape == (1, config.hidden_size) and not bool(store.read(_TYPES).any()):
            config.num_tokentypes = 0  # a single segment that adds zero: a BERT without segments is written like this
        copies = list(family.copies(config, num_classes))
        correspondence = Correspondence.of(parameter_shapes(config, num_classes), copies)
        ignored = family.passed_over(config)
        if num_classes:
            ignored[r"cls\..*"] = "heads of pretraining, which a classifier does not have"
        tied = {}
        if config.is_bert:
            table = f"{family.prefix}embeddings.word_embeddings.weight"
            tied = {"cls.predictions.decoder.weight": table, "cls.predictions.decoder.bias": "cls.predictions.bias"}
        elif not config.untie_embeddings_and_output_weights:
            table = next(copy.theirs.name for copy in copies if copy.ours.name == "embedding.word_embeddings.weight")
            tied = {"lm_head.weight": table, "embed_out.weight": table}
        fates = match_tensors(str(path), correspondence, store, ignored, tied=tied, shown=shown)
        dtypes = _names(store.tensors()[name].dtype for name in correspondence.theirs)
        return Model(
            config, Gathered(correspondence, store), num_classes=num_classes, fates=fates,
            tokenizer=tokenizers.find_files(options.tokenizer or path), settings={"hf": document, _DTYPES: dtypes},
        )  # fmt: skip

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        family, store = self._prepare(model, options)
        path.mkdir()
        files: list[list[safetensors.NamedPiece]] = []
        room = 0  # in the file that is filled: a new one begins where the next tensor would exceed the limit
        for name, info in store.tensors().items():
            if info.dtype not in safetensors.DTYPE_NAMES:
                raise CheckpointError(f"{name} is {info.dtype}, which safetensors files cannot hold: give --dtype")
            if not files or info.num_bytes > room:
                files.append([])
                room = options.max_shard_bytes
            stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")
            files[-1].append(safetensors.NamedPiece(name, info.shape, Piece((0,) * len(info.shape), stand_in)))
            room -= info.num_bytes

        def read(item: safetensors.NamedPiece) -> Tensor:
            tensor = store.read(item.name)
            progress(tensor.numel() * tensor.element_size())
            return tensor

        weight_map: dict[str, str] = {}
        for number, items in enumerate(files):
            file = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            safetensors.write_file(path / file, items, contents=read, plain=True)
            weight_map |= {item.name: file for item in items}
        if len(files) > 1:
            total = {"total_size": sum(info.num_bytes for info in store.tensors().values())}
            _write_json(path / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
        tokenizers.copy_files(model.tokenizer, path)
        document = _document(model, family, {info.dtype for info in store.tensors().values()})
        if _original(model, family) is None:  # a model that came from there keeps its own
            ids, notes = tokenizers.special_ids(model, path)
            document |= ids
            if not model.config.is_bert:
                notes += tokenizers.write_generation_config(ids, path, model.config.vocab_size or 0)
            model.notes += notes
        _write_json(path / CONFIG, document)
        model.notes += tokenizers.write_tokenizer_config(model, path, family.model_type)
        fsync_dir(path)

    def size(self, model: Model, options: Options) -> int:
        return sum(info.num_bytes for info in self._prepare(model, options)[1].tensors().values())

    def _prepare(self, model: Model, options: Options) -> tuple[Family, TensorStore]:
        family = family_for(model)
        ours = {name: info.shape for name, info in model.weights().items()}
        correspondence = Correspondence.of(ours, family.copies(model.config, model.num_classes))
        store = Scattered(correspondence, model.store, options.dtype)
        if not model.config.is_bert or model.config.token_types:
            return family, store
        # transformers' BERT always has a table of segment types: one of zeros stands for none
        words = store.tensors()[_WORDS]
        zeros = torch.zeros(1, words.shape[1], dtype=words.dtype)
        described = {**store.tensors(), _TYPES: TensorInfo(tuple(zeros.shape), words.dtype)}
        return family, Store(described, lambda name: zeros if name == _TYPES else store.read(name))


def _open(path: Path) -> TensorStore:
    for index, single, contents in ((INDEX, SINGLE, _in_safetensors), (BIN_INDEX, BIN, _in_torch_file)):
        names, weight_map = [single], dict[str, str]()
        if (path / index).exists() or (path / index).is_symlink():
            weight_map = _weight_map(path / index)
            names = sorted(set(weight_map.values()))
        elif not (path / single).exists() and not (path / single).is_symlink():
            continue
        files: dict[str, str] = {}
        described: dict[str, TensorInfo] = {}
        readers: dict[str, Callable[[], Tensor]] = {}
        for file in names:
            for name, info, read in contents(path / file):
                if name in files:
                    raise CheckpointError(f"{path}: {name[:200]} is in {files[name]} and again in {file}")
                files[name], described[name], readers[name] = file, info, read
        for name, file in weight_map.items():
            if files.get(name) != file:
                raise CheckpointError(f"{path / index} says that {name[:200]} is in {file}, and it is not: the download"
                                      " is incomplete or mixed")  # fmt: skip
        return Store(described, lambda name, readers=readers: readers[name]())  # type: ignore[misc]
    others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".safetensors"))
    there = f", but {', '.join(others[:5])}" if others else ""
    raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}, nor {BIN}{there}: save the model as safetensors")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = parse_object(read_small_file(index, _MAX_INDEX_BYTES), str(index), _MAX_INDEX_VALUES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of names to files")
    for file in set(weight_map.values()):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", file):
            raise CheckpointError(f"{index} names the file {file[:200]!r}: only plain names of files in the same folder"
                                  " are allowed")  # fmt: skip
    return weight_map


def _in_safetensors(path: Path) -> Contents:
    def read(piece: safetensors.StoredPiece) -> Tensor:
        with open(open_regular(path), "rb", buffering=0) as file:
            return safetensors.read_rows(file, piece, 0, piece.rect.sizes[0] if piece.rect.sizes else 1)

    for piece in safetensors.read_header(path, whole=True):
        yield piece.name, TensorInfo(piece.rect.sizes, safetensors.DTYPES[piece.dtype]), partial(read, piece)


def _in_torch_file(path: Path) -> Contents:
    tree = TorchFile(path).tree
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}, not names and their tensors: save"
                              " its state_dict()")  # fmt: skip
    for name, record in tree.items():
        if not isinstance(name, str) or not isinstance(record, TensorRecord):
            raise CheckpointError(f"{path}: {str(name)[:100]!r} is not a tensor with a name: save the model's"
                                  " state_dict() alone")  # fmt: skip
        dtype = require_dtype(record.dtype, f"{path}: {name[:200]}")
        yield name, TensorInfo(record.shape, dtype), partial(_contiguous, record)


def _contiguous(record: TensorRecord) -> Tensor:
    return record.read().contiguous()


def renamed(store: TensorStore, family: Family) -> tuple[Store, dict[str, str]]:
    """Return a store under the family's current names, stacked tensors taken apart, and the stored name of each."""
    names = {name: family.renamed(name) for name in store.tensors()}
    if not any(new.startswith(family.prefix) for new in names.values()):  # a bare model without a head
        heads = ("lm_head.", "cls.", "classifier.", "embed_out.")
        names = {old: new if new.startswith(heads) else family.prefix + new for old, new in names.items()}
    stored, described, shown, regions = store.tensors(), dict[str, TensorInfo](), dict[str, str](), dict[str, Index]()
    for old, new in names.items():
        info = stored[old]
        inside = family.unstacked(new, info.shape)
        regions |= inside
        shown |= dict.fromkeys(inside or (new,), old)
        described |= {} if inside else {new: info}
        for name, region in inside.items():
            described[name] = TensorInfo(tuple(torch.empty(info.shape, device="meta")[region].shape), info.dtype)
    last = LastRead(store)  # of stacked tensors

    def read(name: str) -> Tensor:
        region = regions.get(name)
        return store.read(shown[name]) if region is None else last.read(shown[name])[region]

    return Store(described, read), shown


def _write_json(path: Path, document: dict[str, Any]) -> None:
    write_synced(path, (json.dumps(document, indent=2) + "\n").encode("utf-8"))


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})


def _original(model: Model, family: Family) -> dict[str, Any] | None:
    original = model.settings.get("hf")
    return original if isinstance(original, dict) and original.get("model_type") == family.model_type else None


def _document(model: Model, family: Family, dtypes: set[torch.dtype]) -> dict[str, Any]:
    # the source's own if it describes the same model, else with the family's entries for the model
    original, config = _original(model, family), model.config
    architecture = family.architecture(classifies=model.num_classes > 0, has_order=config.has_order_head)
    entries = {"architectures": [architecture], "model_type": family.model_type, **family.document(config)}
    entries["torch_dtype"] = _names(dtypes)[0] if len(dtypes) == 1 else "float32"
    if original is None:
        return {**entries, **_labels(model.num_classes)}
    labels = original.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else original.get("num_labels", 2)
    if model.num_classes and (num_labels if isinstance(num_labels, int) else 2) != model.num_classes:
        entries |= _labels(model.num_classes)
    elif _says(family, original, model) == _says(family, entries, model):
        if model.settings.get(_DTYPES) == _names(dtypes):  # unchanged dtypes: config.json's entry still holds
            return original
        return {**original, **{name: entries["torch_dtype"] for name in ("dtype", "torch_dtype") if name in original}}
    if any(name in entries for name in ROTARY):  # an old entry in another place must not override the new one
        original = {name: value for name, value in original.items() if name not in ROTARY}
    return {**original, **entries}


def _labels(num_classes: int) -> dict[str, Any]:
    names = {number: f"LABEL_{number}" for number in range(num_classes)}
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}} if names else {}


def _says(family: Family, document: dict[str, Any], model: Model) -> ModelConfig:
    shapes: Tensors = {"cls.seq_relationship.weight": (2,)} if model.config.has_order_head else {}
    shapes = {**shapes, "classifier.weight": (model.num_classes,)} if model.num_classes else shapes
    return family.config(Settings(document, CONFIG), shapes)
