"""Table of the class and function names accepted in the pickle of a foreign checkpoint.

A pickle names classes and functions and asks for them to be called. Here no name is ever looked up or imported, so none
of them can do anything: the name only decides which kind of plain record replaces the call. The list makes sure that
nothing is silently misread, and that a file that contains more than a checkpoint is refused with the offending name.

Only the standard library is imported: the process that reads pickles loads this file and ``pickle_machine.py`` only.
Source of the names: the files that torch, Megatron-LM, Megatron-DeepSpeed and DeepSpeed write; ``pickle`` renames of
Python 2.
"""

from __future__ import annotations

import re

# Storage classes by the dtype of what they hold; a storage without dtype holds bytes, and the tensor says what they
# are.
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "UntypedStorage": "untyped",
}  # fmt: skip
_STORAGE = re.compile(r"torch\.(cuda\.|storage\.)?([A-Z]\w*Storage)")

DTYPE_NAMES = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
}  # fmt: skip

# Names whose call returns plain data, grouped by what pickle_machine.py does with them.
DICTS = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"}
LISTS = {"collections.deque", "builtins.list"}
TUPLES = {"torch.Size", "builtins.tuple"}
SETS = {"builtins.set": "s", "builtins.frozenset": "f"}
BYTES = {"_codecs.encode", "builtins.bytearray", "builtins.bytes"}
STRINGS = {"torch.torch_version.TorchVersion", "builtins.str"}
TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
TENSOR_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
RECONSTRUCTOR = "copyreg._reconstructor"
ENUM_BY_NAME = "builtins.getattr"
ARRAYS = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
FROM_BUFFER = {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}  # pickle protocol 5
SCALARS = {f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")}

# Names that are kept as names; a call or an instance of them becomes a record with that name.
_EXACT = (
    DICTS | LISTS | TUPLES | set(SETS) | BYTES | STRINGS | TENSORS | PARAMETERS | ARRAYS | SCALARS | FROM_BUFFER
    | {TENSOR_SUBCLASS, RECONSTRUCTOR, ENUM_BY_NAME}
    | {f"torch.{name}" for name in DTYPE_NAMES}
    | {"torch.device", "torch.serialization._get_layout", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
    | {"argparse.Namespace", "types.SimpleNamespace", "numpy.ndarray", "numpy.dtype", "_io.BytesIO", "io.BytesIO", "uuid.UUID"}
    | {f"pathlib.{part}{pure}{kind}Path" for part in ("", "_local.") for pure in ("", "Pure") for kind in ("", "Posix", "Windows")}
    | {f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")}
    | {f"builtins.{name}" for name in ("int", "float", "bool", "complex", "slice", "range", "object")}
    | {"signal.Signals", "torch.distributed.remote_device"}
)  # fmt: skip

# Packages whose enums, settings and bookkeeping are stored in their checkpoints. None of them is installed or imported
# here.
_FAMILIES = (
    "megatron.", "deepspeed.", "apex.", "transformer_engine.", "fp16.loss_scaler.",
    "torch.distributed.checkpoint.", "torch.distributed._shard.",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][\w.]{0,299}", re.ASCII)
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2 that Python 3 has changed


def full_name(module: str, name: str) -> str | None:
    """Return the dotted name of a global that the machine knows, or None if it must be refused."""
    full = f"{_RENAMED.get(module, module)}.{name}"
    if not _NAME.fullmatch(full) or ".." in full:
        return None
    return full if full in _EXACT or full.startswith(_FAMILIES) or storage_dtype(full) else None


def storage_dtype(full: str) -> str | None:
    """Return the dtype of a storage class, "untyped" for plain bytes, or None for other names."""
    found = _STORAGE.fullmatch(full)
    return STORAGES.get(found[2]) if found else None
