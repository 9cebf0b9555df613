"""``hf``: a folder with config.json, safetensors files and a tokenizer, as ``save_pretrained`` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint import safetensors_file as safetensors
from megatron_sp.checkpoint.pieces import Piece
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert import tokenizers
from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile, require_dtype
from megatron_sp.convert.copies import Correspondence, Gathered, Index, LastRead, Scattered, TensorInfo, TensorStore
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


class HuggingFace:
    """Folders of transformers: config.json and safetensors (or old ``.bin``) files."""

    name, holds_optimizer = "hf", False

    def recognises(self, path: Path) -> bool:
        return (path / CONFIG).exists() and not (path / "latest").exists()

    def read(self, path: Path, options: Options) -> Model:
        document = _json(path / CONFIG, _MAX_CONFIG_BYTES, _MAX_CONFIG_VALUES)
        family = family_named(document, path / CONFIG)
        store = _Renamed(_open(path), family)
        shapes = {name: info.shape for name, info in store.tensors().items()}
        settings = Settings(document, str(path / CONFIG))
        config, num_classes = family.config(settings, shapes), family.num_classes(shapes)
        require_sound(config, len(shapes), str(path / CONFIG))
        types = store.tensors().get(_TYPES) if config.is_bert and config.token_types == 1 else None
        if types is not None and types.shape == (1, config.hidden_size) and not bool(store.read(_TYPES).any()):
            config.num_tokentypes = 0  # a single segment that adds zero: a BERT without segments is written like this
        correspondence = Correspondence.of(parameter_shapes(config, num_classes), family.copies(config, num_classes))
        unused = {r"cls\..*": "heads of pretraining, which a classifier does not have"} if num_classes else {}
        ignored = {**family.ignored(config), **unused}
        coverage = match_tensors(str(path), correspondence, store, ignored, tied=_tied(family, config), shown=store.old)
        tokenizer = tokenizers.find_files(options.tokenizer or path)
        dtypes = _names(store.tensors()[name].dtype for name in coverage.correspondence.theirs)
        return Model(
            config, Gathered(coverage.correspondence, store), num_classes=num_classes, fates=coverage.fates,
            tokenizer=tokenizer, settings={"hf": document, _DTYPES: dtypes},
        )  # fmt: skip

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        family, store = self._prepare(model, options)
        path.mkdir()
        files = divide(store, options.max_shard_bytes)
        weight_map: dict[str, str] = {}
        for number, items in enumerate(files):
            name = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            write_tensors(path / name, items, _Counted(store, progress))
            weight_map |= {item.name: name for item in items}
        if len(files) > 1:
            total = {"total_size": sum(info.num_bytes for info in store.tensors().values())}
            _write_json(path / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
        dtypes = {info.dtype for info in store.tensors().values()}
        tokenizers.copy_files(model.tokenizer, path)
        document = _document(model, family, dtypes)
        if not _is_of(model, family):  # a model that came from there keeps its own
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
        return family, _WithoutTypes(store) if model.config.is_bert and not model.config.token_types else store


class SafetensorsFiles:
    """The tensors of several files (a ``TensorStore``)."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self._pieces: dict[str, safetensors.StoredPiece] = {}
        for name in names:
            for piece in safetensors.read_header(folder / name, whole=True):
                if piece.name in self._pieces:
                    raise CheckpointError(f"{folder}: {piece.name[:200]} is in {self._pieces[piece.name].file} and"
                                          f" again in {piece.file}")  # fmt: skip
                self._pieces[piece.name] = piece
        self._tensors = {}
        for name, piece in self._pieces.items():
            self._tensors[name] = TensorInfo(piece.rect.sizes, safetensors.DTYPES[piece.dtype])

    def file_of(self, name: str) -> str:
        return self._pieces[name].file

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        piece = self._pieces[name]
        with open(open_regular(self.folder / piece.file), "rb", buffering=0) as file:
            return safetensors.read_rows(file, piece, 0, piece.rect.sizes[0] if piece.rect.sizes else 1)


def divide(store: TensorStore, max_bytes: int) -> list[list[safetensors.NamedPiece]]:
    """Assign the tensors to files in order: a new file begins where the next tensor would exceed ``max_bytes``."""
    files: list[list[safetensors.NamedPiece]] = []
    room = 0
    for name, info in store.tensors().items():
        stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")
        if not files or info.num_bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(safetensors.NamedPiece(name, info.shape, Piece((0,) * len(info.shape), stand_in)))
        room -= info.num_bytes
    return files


def write_tensors(path: Path, items: list[safetensors.NamedPiece], store: TensorStore) -> None:
    """Write one file, each tensor read when its turn comes."""
    for item in items:
        if item.piece.tensor.dtype not in safetensors.DTYPE_NAMES:
            raise CheckpointError(f"{item.name} is {item.piece.tensor.dtype}, which safetensors files cannot hold: give"
                                  " --dtype")  # fmt: skip
    safetensors.write_file(path, items, contents=lambda item: store.read(item.name), plain=True)


class TorchFiles:
    """The tensors of several files (a ``TensorStore``)."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._found: dict[str, TensorRecord] = {}
        for name in names:
            self._take(TorchFile(folder / name))
        self._tensors = {}
        for name, record in self._found.items():
            dtype = require_dtype(record.dtype, f"{record.file.path}: {name[:200]}")
            self._tensors[name] = TensorInfo(record.shape, dtype)

    def _take(self, file: TorchFile) -> None:
        if not isinstance(file.tree, dict):
            raise CheckpointError(f"{file.path} holds a {type(file.tree).__name__}, not names and their tensors: save"
                                  " its state_dict()")  # fmt: skip
        for name, record in file.tree.items():
            if not isinstance(name, str) or not isinstance(record, TensorRecord):
                raise CheckpointError(f"{file.path}: {str(name)[:100]!r} is not a tensor with a name: save the model's"
                                      " state_dict() alone")  # fmt: skip
            if name in self._found:
                raise CheckpointError(f"{file.path.parent}: {name[:200]} is in {self._found[name].file.path.name} and"
                                      f" again in {file.path.name}")  # fmt: skip
            self._found[name] = record

    def file_of(self, name: str) -> str:
        return self._found[name].file.path.name

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        return self._found[name].read().contiguous()


class _Renamed:
    """A store under the family's current names (a ``TensorStore``)."""

    def __init__(self, store: TensorStore, family: Family) -> None:
        self._store = store
        names = {name: family.renamed(name) for name in store.tensors()}
        if not any(new.startswith(family.prefix) for new in names.values()):  # a bare model without a head
            heads = ("lm_head.", "cls.", "classifier.", "embed_out.")
            names = {old: new if new.startswith(heads) else family.prefix + new for old, new in names.items()}
        self.old, self._regions = dict[str, str](), dict[str, Index]()
        self._last = LastRead(store)  # of stacked tensors
        for old, new in names.items():
            regions = family.unstacked(new, store.tensors()[old].shape)
            self._regions |= regions
            self.old |= dict.fromkeys(regions, old) if regions else {new: old}

    def tensors(self) -> Mapping[str, TensorInfo]:
        stored = self._store.tensors()
        described = {new: stored[old] for new, old in self.old.items()}
        for name, region in self._regions.items():
            shape, dtype = described[name].shape, described[name].dtype
            described[name] = TensorInfo(tuple(torch.empty(shape, device="meta")[region].shape), dtype)
        return described

    def read(self, name: str) -> Tensor:
        region = self._regions.get(name)
        return self._store.read(self.old[name]) if region is None else self._last.read(self.old[name])[region]


class _WithoutTypes:
    """A BERT without segment types plus a zero table for one, which transformers always has (a ``TensorStore``)."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        words = store.tensors()[_WORDS]
        self._table = TensorInfo((1, words.shape[1]), words.dtype)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {**self._store.tensors(), _TYPES: self._table}

    def read(self, name: str) -> Tensor:
        return torch.zeros(self._table.shape, dtype=self._table.dtype) if name == _TYPES else self._store.read(name)


class _Counted:
    def __init__(self, store: TensorStore, progress: Progress) -> None:
        self._store, self._progress = store, progress

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._store.tensors()

    def read(self, name: str) -> Tensor:
        tensor = self._store.read(name)
        self._progress(tensor.numel() * tensor.element_size())
        return tensor


def _tied(family: Family, config: ModelConfig) -> dict[str, str]:
    if config.is_bert:
        table = f"{family.prefix}embeddings.word_embeddings.weight"
        return {"cls.predictions.decoder.weight": table, "cls.predictions.decoder.bias": "cls.predictions.bias"}
    if config.untie_embeddings_and_output_weights:
        return {}
    copies = family.copies(config, 0)
    table = next(copy.theirs.name for copy in copies if copy.ours.name == "embedding.word_embeddings.weight")
    return {"lm_head.weight": table, "embed_out.weight": table}


def _open(path: Path) -> TensorStore:
    kinds: tuple[tuple[str, str, type[SafetensorsFiles | TorchFiles]], ...] = (
        (INDEX, SINGLE, SafetensorsFiles), (BIN_INDEX, BIN, TorchFiles)
    )  # fmt: skip
    for index, single, kind in kinds:
        if (path / index).exists() or (path / index).is_symlink():
            return _open_sharded(path, index, kind)
        if (path / single).exists() or (path / single).is_symlink():
            return kind(path, [single])
    others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".safetensors"))
    there = f", but {', '.join(others[:5])}" if others else ""
    raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}, nor {BIN}{there}: save the model as safetensors")


def _open_sharded(path: Path, index: str, kind: type[SafetensorsFiles | TorchFiles]) -> SafetensorsFiles | TorchFiles:
    weight_map = _json(path / index, _MAX_INDEX_BYTES, _MAX_INDEX_VALUES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path / index} has no weight_map of names to files")
    for file in set(weight_map.values()):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", file):
            raise CheckpointError(f"{path / index} names the file {file[:200]!r}: only plain names of files in the same"
                                  " folder are allowed")  # fmt: skip
    store = kind(path, sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in store.tensors() or store.file_of(name) != file:
            raise CheckpointError(f"{path / index} says that {name[:200]} is in {file}, and it is not: the download is"
                                  " incomplete or mixed")  # fmt: skip
    return store


def _json(path: Path, max_bytes: int, max_values: int) -> dict[str, Any]:
    return parse_object(read_small_file(path, max_bytes), str(path), max_values)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    write_synced(path, (json.dumps(document, indent=2) + "\n").encode("utf-8"))


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})


def _document(model: Model, family: Family, dtypes: set[torch.dtype]) -> dict[str, Any]:
    # the source's own if it describes the same model, else with the family's entries for the model
    original = model.settings.get("hf")
    entries = {
        "architectures": [family.architecture(model.config, model.num_classes)], "model_type": family.model_type,
        **family.document(model.config),
    }  # fmt: skip
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    entries["torch_dtype"] = str(dtype).removeprefix("torch.")
    same_kind = _is_of(model, family)
    if model.num_classes and not (same_kind and _num_labels(original) == model.num_classes):
        names = {number: f"LABEL_{number}" for number in range(model.num_classes)}
        entries |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if not isinstance(original, dict) or not same_kind:
        return entries
    if "id2label" not in entries and _says(family, original, model) == _says(family, entries, model):
        if model.settings.get(_DTYPES) == _names(dtypes):  # unchanged dtypes: config.json's entry still holds
            return original
        return {**original, **{name: entries["torch_dtype"] for name in ("dtype", "torch_dtype") if name in original}}
    if any(name in entries for name in ROTARY):  # an old entry in another place must not override the new one
        original = {name: value for name, value in original.items() if name not in ROTARY}
    return {**original, **entries}


def _is_of(model: Model, family: Family) -> bool:
    original = model.settings.get("hf")
    return isinstance(original, dict) and original.get("model_type") == family.model_type


def _num_labels(document: Any) -> int:
    names = document.get("id2label")
    count = len(names) if isinstance(names, dict) else document.get("num_labels", 2)
    return count if isinstance(count, int) else 2


def _says(family: Family, document: dict[str, Any], model: Model) -> ModelConfig:
    shapes: Tensors = {"cls.seq_relationship.weight": (2,)} if model.config.has_order_head else {}
    shapes = {**shapes, "classifier.weight": (model.num_classes,)} if model.num_classes else shapes
    return family.config(Settings(document, CONFIG), shapes)
