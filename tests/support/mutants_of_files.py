"""Broken and hostile versions of checkpoint files, drawn from a seed: bytes, JSON documents, pickles, zip files, whole folders.

Each function takes something sound and a generator and returns something that may be anything: cut, of another type,
larger than any memory, named like a place outside. Nothing here is random but by the generator, so a case is found
again by its seed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickletools
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBERS = (-1, 0, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63))
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e308, -1.5, 0.5, 1e-300)
WORDS = (
    "", ".", "..", "../out", "/etc/passwd", "a" * 5000, "\x1b[2J", "\0", "ü", "\ud800", "-1", "1e9", "None", "nan",
    "float32", "bfloat16", "F8_E4M3", "model.safetensors", "%s%n", "{0}", "\n", "data.pkl", "default",
)  # fmt: skip


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def value(draw: random.Random) -> Any:
    """A JSON value (as Python takes it) that is seldom what is expected."""
    kind = draw.randrange(8)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice(FLOATS)
    if kind == 3:
        return draw.choice(WORDS)
    if kind == 4:
        return draw.choice((None, True, False))
    return draw.choice((
        [], {}, [[]], {"": {}}, deep(40), deep(5000), [0] * 100, ["x"], [1, 2], [2, 1], [-1, 3], [2**62, 2**62], [2**63, -1], [0.5, 1.0],
        {"a": 1}, [None], [True, False], {"quant_method": "gptq"}, {"type": "yarn", "factor": 2.0}, {"rope_type": "dynamic"},
    ))  # fmt: skip


def bytes_of(data: bytes, draw: random.Random, end: int | None = None) -> bytes:
    """One to three changes within the first ``end`` bytes: flipped, set, cut, put in, taken out, repeated, large numbers."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        limit = min(end or len(found), len(found))
        if not limit:
            return bytes(draw.randbytes(draw.randrange(100)))
        at, kind = draw.randrange(limit), draw.randrange(8)
        if kind < 2:
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            found[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B))
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at:at] = draw.randbytes(draw.choice((1, 2, 8, 100)))
        elif kind == 5:
            del found[at : at + draw.choice((1, 2, 8, 100))]
        elif kind == 6:
            found[at:at] = found[at : at + draw.choice((1, 8, 64, 1000))]
        else:
            found[at : at + 8] = struct.pack(draw.choice("<>") + "Q", draw.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)))
    return bytes(found)


def text_of(document: Any) -> bytes:
    """JSON as Python writes it, lone surrogates and NaN included; what has no JSON at all becomes a string."""
    try:
        return json.dumps(document).encode("utf-8")
    except (ValueError, RecursionError):  # digits beyond Python's limit, or depth
        return b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"


def _places(node: Any, levels: int = 8) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of the outer levels of a document."""
    if levels and isinstance(node, (dict, list)):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from _places(node[key], levels - 1)


def json_of(data: bytes, draw: random.Random) -> bytes:
    """The document with some of its values replaced, removed, renamed or given twice; sometimes its bytes are broken instead."""
    if draw.random() < 0.15:
        return bytes_of(data, draw)
    document = json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = list(_places(document))
        if not places or draw.random() < 0.03:
            document = value(draw)
            continue
        node, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind < 4:
            node[key] = value(draw)
        elif kind == 4:
            del node[key]
        elif isinstance(node, dict):
            node[draw.choice(WORDS)] = node.pop(key) if draw.random() < 0.5 else node[key]
    found = text_of(document)
    if draw.random() < 0.05 and found.startswith(b"{") and b":" in found:
        first = found[1:].split(b",")[0].rstrip(b"}")
        found = b"{" + first + b"," + found[1:]
    return found


def safetensors_of(data: bytes, draw: random.Random) -> bytes:
    """A changed header with a fitting length, or changed bytes in front, or another end."""
    length = struct.unpack("<Q", data[:8])[0]
    kind = draw.randrange(6)
    if kind == 0:
        return bytes_of(data, draw, 8 + length)
    if kind == 1:
        return data[: draw.randrange(len(data))] if draw.random() < 0.5 else data + draw.randbytes(draw.choice((1, 4, 4096)))
    if kind == 2:
        wrong = (0, 1, 2, length - 1, length + 1, len(data), 2**24, 2**24 + 1, 2**40, 2**63, 2**64 - 1)
        return struct.pack("<Q", draw.choice(wrong)) + data[8:]
    header = json_of(data[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _long(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data))) + data


_STORAGE = b"(" + _string("storage") + b"ctorch\nFloatStorage\n" + _string("0") + _string("cpu") + b"K\x04tQ"
_DTYPE = b"cnumpy\ndtype\n" + _string("f8") + b"K\x00K\x01\x87R(K\x03" + _string("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
_FRAGMENTS = (
    b"N", b"\x88", b"\x89", b"]", b"}", b")", b"\x8f", b"C\x03abc", b"(K\x01K\x02t", b"(K\x01K\x02l", b"]q\x00h\x00a",
    b"K\x01\x85", b"(NNd", _STORAGE, b"ctorch\nfloat32\n", b"cargparse\nNamespace\n", b"cargparse\nNamespace\n)\x81}b",
    b"cargparse\nNamespace\n)\x81Nb", b"cargparse\nNamespace\n)\x81" + _string("x") + b"b",
    b"ccollections\nOrderedDict\n)R", b"cposix\nsystem\n", b"cposix\nsystem\n" + _string("true") + b"\x85R",
    b"cmegatron.core.enums\nModelType\nK\x01\x85R",
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00K\x04\x85K\x01\x85\x89}tR",
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00))\x89}tR",
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00" + _long(2**61) + b"\x85K\x00\x85\x89}tR",
    b"ctorch\nSize\n(K\x02t\x85R", b"ctorch\nSize\n(" + _long(2**61) + _long(2**61) + b"t\x85R", b"(" * 3 + b"ttt",
    b"]" * 99 + b"a" * 98, b"]" * 150 + b"a" * 149,
    b"cnumpy.core.multiarray\nscalar\n" + _DTYPE + b"C\x08\0\0\0\0\0\0\xf8\x7f\x86R",
    b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01K\x02\x85" + _DTYPE
        + b"\x89C\x10" + b"\0" * 16 + b"tb",
    b"cpathlib\nPosixPath\n" + _string("/etc") + b"\x85R", b"cdatetime\ndate\nC\x04\x07\xe4\x01\x02\x85R",
    b"(" + b"N" * 200 + b"l", b"0", b"1", b"2", b"(", b"h\x01", b"R", b"b", b"Q",
)  # fmt: skip
_LEAVES = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "GLOBAL", "SHORT_BINSTRING",
}  # fmt: skip


def fragment(draw: random.Random) -> bytes:
    """Opcodes that, mostly, put one value on the stack."""
    kind = draw.randrange(5)
    if kind == 0:
        return _long(draw.choice(NUMBERS))
    if kind == 1:
        return b"G" + struct.pack(">d", draw.choice(FLOATS))
    if kind == 2:
        return _string(draw.choice(WORDS))
    return draw.choice(_FRAGMENTS)


def pickle_of(data: bytes, draw: random.Random) -> bytes:
    """The same program with some opcodes replaced, left out, repeated, exchanged, put in, or cut off."""
    if draw.random() < 0.1:
        return bytes_of(data, draw)
    found = list(pickletools.genops(data))
    ends = [position for _, _, position in found[1:]] + [len(data)]
    parts = [data[position:end] for (_, _, position), end in zip(found, ends, strict=True)]
    leaves = [index for index, (opcode, _, _) in enumerate(found) if opcode.name in _LEAVES]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind, at = draw.randrange(10), draw.randrange(len(parts))
        if kind < 6:
            parts[draw.choice(leaves)] = fragment(draw)
        elif kind == 6:
            parts[at] = b""
        elif kind == 7:
            parts[at] *= draw.choice((2, 2, 3, 1000))
        elif kind == 8:
            other = draw.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts[at] = fragment(draw) + parts[at]
    return b"".join(parts)


def zip_of(data: bytes, draw: random.Random) -> bytes:
    """A torch file with another pickle, or other entries, or broken bytes outside its storages."""
    kind = draw.randrange(10)
    if kind == 0:
        directory = data.rfind(b"PK\x05\x06")
        start = struct.unpack("<I", data[directory + 16 : directory + 20])[0]
        return data[:start] + bytes_of(data[start:], draw)
    if kind == 1:
        return bytes_of(data, draw, 400)
    if kind == 2:
        return data[: draw.randrange(len(data))] if draw.random() < 0.7 else data + draw.randbytes(30)
    entries = [(info.filename, zipfile.ZipFile(io.BytesIO(data)).read(info)) for info in zipfile.ZipFile(io.BytesIO(data)).infolist()]
    how = zipfile.ZIP_STORED
    if kind < 8:
        entries = [(name, pickle_of(text, draw) if name.endswith("data.pkl") else text) for name, text in entries]
    else:
        entries, how = _other_entries(entries, draw)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as file:
        for name, text in entries:
            file.writestr(name, text)
    return made.getvalue()


def _other_entries(entries: list[tuple[str, bytes]], draw: random.Random) -> tuple[list[tuple[str, bytes]], int]:
    found, at = list(entries), draw.randrange(len(entries))
    name, text = found[at]
    kind = draw.randrange(7)
    if kind == 0:
        return found, zipfile.ZIP_DEFLATED
    if kind == 1:
        del found[at]
    elif kind == 2:
        found.append((name + "x", text))
    elif kind == 3:
        found[at] = (name, text[: len(text) // 2])
    elif kind == 4:
        found[at] = (name, text * 2)
    elif kind == 5:
        names = ("../x", "/etc/x", "archive/constants.pkl", "other/data.pkl", "archive/", "a\\b", "archive/data/99")
        found[at] = draw.choice(names), text
    else:
        found = [(n, b"big" if n.endswith("byteorder") else t) for n, t in found]
    return found, zipfile.ZIP_STORED


_BY_NAME: list[tuple[Callable[[str], bool], Callable[[bytes, random.Random], bytes]]] = [
    (lambda name: name.endswith(".json"), json_of),
    (lambda name: name.endswith(".safetensors"), safetensors_of),
    (lambda name: name == ".metadata", pickle_of),
    (lambda name: name.endswith(".pt"), zip_of),
    (lambda name: name.endswith(".distcp"), lambda data, draw: bytes_of(data, draw, min(len(data), 4000))),
    (lambda name: True, lambda data, draw: draw.choice(WORDS + ("release", "9" * 30, "3\n")).encode("utf-8", "surrogatepass")),
]


def folder_of(folder: Path, draw: random.Random) -> str:
    """Change one file of a folder, or what is in its place; says which and how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, kind = draw.choice(files), draw.randrange(40)
    if kind >= 6:
        change = next(change for fits, change in _BY_NAME if fits(path.name))
        path.write_bytes(change(path.read_bytes(), draw))
    elif kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        other = draw.choice(files)
        shutil.copyfile(other, path.with_name("copied"))
        os.replace(path.with_name("copied"), path)
    elif kind == 3:
        shutil.move(path, path.with_name("elsewhere"))
        path.symlink_to(draw.choice(("elsewhere", "/etc/passwd", "nowhere", ".")))
    elif kind == 4:
        path.unlink()
        path.mkdir()
    else:
        path.unlink()
        os.mkfifo(path)
    return f"{path.relative_to(folder)} ({kind})"


def reseal(step: Path) -> None:
    """Make MANIFEST.json of a step folder say what its files hold now, as whoever writes such a folder can; one that is broken stays."""
    path = step / "MANIFEST.json"
    try:
        document = json.loads(path.read_bytes())
        names = list(document["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    for name in names:
        if (step / name).is_file() and not (step / name).is_symlink():
            data = (step / name).read_bytes()
            document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    document["manifest_sha256"] = "0" * 64
    text = text_of(document)
    path.write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))
