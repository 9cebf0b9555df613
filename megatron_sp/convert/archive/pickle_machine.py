"""An interpreter of pickles that produces plain data and can do nothing else.

A pickle is a program for a stack machine. This one has the stack, the marks and the memo, and represents every class
and function by a record of its name: nothing is imported, looked up, called or constructed, whatever the pickle
contains. Opcodes that occur only in hand-made pickles or in Python 2's text protocol are refused by name.

Values are JSON as far as possible: None, booleans, numbers and strings represent themselves, bytes stay bytes, and
everything else is a sequence that begins with a tag: a list where later opcodes may add to it, else a named tuple
(``Global``, ``Storage``, ``Tensor``), which JSON writes as a list, too::

    ["[", item, ...]  ["(", item, ...]  ["{", key, value, ...]       list, tuple, dict (in order, a key may come twice)
    ["s", item, ...]  ["f", item, ...]                               set, frozenset
    ["g", name]                                                      a class, function or constant, by name only
    ["o", name, args, state, item, ...]                              the result of calling the name; state: from BUILD
    ["S", key, dtype, numel]                                         a storage; its bytes are elsewhere in the file
    ["T", storage, offset, size, stride, requires_grad, dtype]       a tensor; offset and stride in elements, dtype or None

Shared parts stay shared here but would be written out in full for the reader ("billion laughs"): ``check`` bounds the
size beforehand and refuses cycles. The memory and time of a single opcode are bounded from outside, by the process
(``pickle_worker.py``). Only the standard library is imported. Source: the comments of CPython's ``pickletools``;
torch/_utils.py for the tensors' arguments.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_sp.convert.archive import pickle_globals as names

MAX_DEPTH = 100  # levels of nesting; checkpoints have some ten
MAX_DIMS = 64
MAX_LONG_BYTES = 32
MAX_DEVICES = 64  # devices of one process
_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_DEVICE = re.compile(r"[a-z]{1,20}:[0-9]{1,4}")
_NODE_COST = 32  # bytes counted for every value, besides its own text
_LIST_COST = 96  # likewise for values that contain others: lists, dicts, tensors, objects

Node = Any  # as above


class Global(NamedTuple):
    """Reference to a class, function or constant by its dotted name."""

    tag: str  # "g"
    name: str


class Storage(NamedTuple):
    """Reference to a storage, whose bytes are elsewhere in the file."""

    tag: str  # "S"
    key: str
    dtype: str
    numel: int


class Tensor(NamedTuple):
    """Location of a tensor's elements in a storage; size and stride are tuple nodes."""

    tag: str  # "T"
    storage: Storage
    offset: int
    size: list[Node]
    stride: list[Node]
    requires_grad: bool
    dtype: str | None


class Refused(Exception):
    """Refusal of a pickle; its text is a clause for a message that begins with the file's name."""


class Machine:
    """Interpreter of one pickle, from its first byte to its STOP.

    Args:
        data: the bytes that contain the pickle; bytes after its end are ignored.
        start: position of its first byte.
    """

    def __init__(self, data: bytes, start: int = 0) -> None:
        self.data, self.at = data, start
        self.stack: list[Node] = []
        self.outer: list[list[Node]] = []  # stacks below each open mark
        self.memo: dict[int, Node] = {}
        self.storages: dict[str, Storage] = {}
        self.devices: set[str] = set()  # devices with a number, such as cuda:1, on which storages were

    def run(self) -> Node:
        """Return the pickle's value; afterwards ``at`` is the first byte after it and ``storages`` are the storages it refers to, by key.

        Raises:
            Refused: it contains names that checkpoints do not have, is cut short, or is not a pickle.
        """
        while True:
            opcode = self.take(1)
            if opcode == b".":
                return self.pop()
            if opcode not in _ACTIONS:
                name = _REFUSED.get(opcode)
                what = f"uses {name}, which checkpoints do not need" if name else f"has {opcode!r} where an opcode should be: it is damaged"
                raise Refused(f"{what} (byte {self.at - 1:,} of the pickle)")
            _ACTIONS[opcode](self)

    def take(self, count: int) -> bytes:
        """Read bytes. Raises Refused at the end of the data."""
        end = self.at + count
        if end > len(self.data):
            raise Refused(f"ends at byte {len(self.data):,} of its pickle in the middle of a value: it is cut short")
        part, self.at = self.data[self.at : end], end
        return part

    def number(self, layout: str) -> int:
        """Read a number in a format of ``struct``."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]  # type: ignore[no-any-return]

    def text(self, count: int) -> str:
        """Read UTF-8 text of so many bytes."""
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError:
            raise Refused("has a string that is not UTF-8") from None

    def line(self) -> str:
        """Read text up to the end of the line."""
        end = self.data.find(b"\n", self.at, self.at + 1000)
        if end < 0:
            raise Refused("has a name without an end: it is damaged")
        return self.text(end + 1 - self.at)[:-1]

    def push(self, value: Node) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self) -> Node:
        """Take a value from the stack. Raises Refused if it is empty."""
        if not self.stack:
            raise Refused("takes a value from an empty stack: it is damaged")
        return self.stack.pop()

    def top(self, tags: str, what: str) -> list[Node]:
        """Return the container on top of the stack, which must have one of these tags."""
        node = self.stack[-1] if self.stack else None
        if not (isinstance(node, list) and node[0] in tags):
            raise Refused(f"{what}: it is damaged")
        return node

    def pop_mark(self) -> list[Node]:
        """Return the values since the last mark and go back to the stack before it."""
        if not self.outer:
            raise Refused("ends a group that it did not begin: it is damaged")
        items, self.stack = self.stack, self.outer.pop()
        return items

    def global_(self, module: str, name: str) -> None:
        """Push the name of a class or function; nothing is imported. Raises Refused if it is not on the list."""
        full = names.full_name(module, name)
        if full is None:
            raise Refused(f"names {f'{module}.{name}'[:200]!r}, which is not part of the checkpoints that are read here")
        self.push(Global("g", full))

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        self.memo[index] = self.pop()
        self.push(self.memo[index])

    def recall(self, index: int) -> None:
        """Push a value of the memo."""
        if index not in self.memo:
            raise Refused("refers to a value that it does not have: it is damaged")
        self.push(self.memo[index])

    def mark(self) -> None:
        """Begin a group of values."""
        self.outer.append(self.stack)
        self.stack = []

    def duplicate(self) -> None:
        """Push the top of the stack once more."""
        self.remember(-1)
        self.push(self.memo[-1])

    def tuple_of(self, count: int) -> None:
        """Replace the top values by a tuple of them."""
        items = [self.pop() for _ in range(count)]
        self.push(["(", *reversed(items)])

    def long(self, count: int) -> None:
        """Push an integer of so many bytes. Raises Refused if it is too large."""
        if count > MAX_LONG_BYTES:
            raise Refused(f"has an integer of {count:,} bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def stack_global(self) -> None:
        """Push the name whose module and own name are on the stack."""
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise Refused("has a name that is not a string: it is damaged")
        self.global_(module, name)

    def short_string(self, count: int) -> None:
        """Push a string of Python 2: text if it is UTF-8, otherwise bytes."""
        data = self.take(count)
        try:
            self.push(data.decode("utf-8"))
        except UnicodeDecodeError:
            self.push(data)

    def append(self, items: list[Node]) -> None:
        """Append to the list on top of the stack."""
        self.top("[o", "appends to something that is not a list").extend(items)

    def set_items(self, items: list[Node]) -> None:
        """Set keys and values of the dict on top of the stack."""
        if len(items) % 2:
            raise Refused("has a key without a value: it is damaged")
        self.top("{o", "sets an item of something that is not a dict").extend(items)

    def call(self, args: Node) -> None:
        """Handle REDUCE and NEWOBJ: push the result of calling the name with the arguments, as plain data."""
        function = self.pop()
        if not isinstance(function, Global):
            raise Refused("calls something that is not a name")
        if not (isinstance(args, list) and args[0] == "("):
            raise Refused(f"calls {function.name} with something that is not a tuple")
        self.push(result_of(function.name, args[1:]))

    def build(self) -> None:
        """Handle BUILD: set the attributes of the object below; those of an ordered dict (torch's ``_metadata``) are dropped."""
        state = self.pop()
        node = self.top("o{", "sets attributes of something that has none")
        if node[0] == "o":
            node[3] = state

    def persistent(self) -> None:
        """Handle BINPERSID: push the storage of a persistent id ("storage", class, key, device, number of elements[, view])."""
        args = self.pop()
        parts = args[1:] if isinstance(args, list) and args[0] == "(" else []
        if len(parts) == 6 and parts[5] is None:
            parts = parts[:5]
        if len(parts) != 5 or parts[0] != "storage":
            raise Refused("refers to something outside that is not a storage: save state dicts, not modules")
        kind, key, numel = parts[1], parts[2], parts[4]
        dtype = names.storage_dtype(kind.name) if isinstance(kind, Global) else None
        if dtype is None or not (isinstance(key, str) and 0 < len(key) <= 100) or not is_count(numel):
            raise Refused("describes a storage without a known class, a key and a size")
        if isinstance(parts[3], str) and len(self.devices) < MAX_DEVICES and _DEVICE.fullmatch(parts[3]):
            self.devices.add(parts[3])
        storage = self.storages.setdefault(key, Storage("S", key, dtype, numel))
        if (storage.dtype, storage.numel) != (dtype, numel):
            raise Refused(f"describes the storage {key!r} in two ways: {storage.dtype} of {storage.numel:,} and {dtype} of {numel:,}")
        self.push(storage)


def is_count(value: Node) -> bool:
    """Return whether the value is a non-negative integer of at most 62 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def result_of(name: str, args: list[Node]) -> Node:
    """Return the node that represents a call of the name with these arguments.

    Raises:
        Refused: the name produces plain data, but not from such arguments.
    """
    for group, make in _MAKERS:
        if name in group:
            result = make(name, args)
            if result is None:
                raise Refused(f"calls {name} with arguments that it does not take")
            return result
    return ["o", name, ["(", *args], None]


def _items(args: list[Node]) -> list[Node] | None:
    """Return the items of the single list, tuple or set argument, [] without arguments, None for anything else."""
    if not args:
        return []
    return args[0][1:] if len(args) == 1 and isinstance(args[0], list) and args[0][0] in "[(sf" else None


def _container(tag: str) -> Callable[[str, list[Node]], Node]:
    def make(name: str, args: list[Node]) -> Node:
        items = _items(args[:1] if name == "collections.deque" else args)  # its second argument is a maximum length
        return None if items is None else [tag, *items]

    return make


def _dict(name: str, args: list[Node]) -> Node:
    if name == "collections.defaultdict":
        args = args[1:]  # its factory is for missing keys, which are never looked up here
    if len(args) == 1 and isinstance(args[0], list) and args[0][0] == "{":
        return list(args[0])
    pairs = _items(args)
    if pairs is None or any(not (isinstance(p, list) and len(p) == 3 and p[0] in "[(") for p in pairs):
        return None
    return ["{", *(part for pair in pairs for part in pair[1:])]


def _set(name: str, args: list[Node]) -> Node:
    return _container(names.SETS[name])(name, args)


def _bytes(name: str, args: list[Node]) -> Node:
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], bytes):
        return args[0]
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        try:
            return args[0].encode("latin-1")
        except UnicodeEncodeError:
            return None
    return None


def _string(_name: str, args: list[Node]) -> Node:
    return args[0] if len(args) == 1 and isinstance(args[0], str) else None


def _tensor(name: str, args: list[Node]) -> Node:
    """Node of _rebuild_tensor(storage, offset, size, stride), _v2(..., requires_grad, hooks[, metadata]), _v3(..., dtype[, metadata])."""
    least = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}[name.rsplit(".", 1)[1]]
    extra = args[least:] if least > 4 else []
    if not least <= len(args) <= least + 1 or any(node is not None and node != ["{"] for node in extra):
        return None  # the last argument has the bits of conjugate and negative views
    storage, offset, size, stride = args[:4]
    shapes = all(isinstance(n, list) and n[0] == "(" and len(n) <= MAX_DIMS and all(map(is_count, n[1:])) for n in (size, stride))
    if not (isinstance(storage, Storage) and is_count(offset) and shapes and len(size) == len(stride)):
        return None
    dtype = None
    if least == 7:
        dtype = args[6].name.removeprefix("torch.") if isinstance(args[6], Global) else None
        if dtype not in names.DTYPE_NAMES:
            return None
    return Tensor("T", storage, offset, size, stride, least > 4 and args[4] is True, dtype)


def _parameter(_name: str, args: list[Node]) -> Node:
    """Node of _rebuild_parameter(tensor, requires_grad, hooks[, state])."""
    tensor = args[0] if len(args) in (3, 4) else None
    return tensor._replace(requires_grad=args[1] is True) if isinstance(tensor, Tensor) else None


def _tensor_subclass(_name: str, args: list[Node]) -> Node:
    """Node of _rebuild_from_type_v2(function, class, arguments, state): the tensor, without attributes set on it."""
    if len(args) != 4 or not (isinstance(args[0], Global) and isinstance(args[1], Global)):
        return None
    function, cls, given = args[:3]
    known = function.name in names.TENSORS | names.PARAMETERS and cls.name in _TENSOR_CLASSES
    return result_of(function.name, given[1:]) if known and isinstance(given, list) and given[0] == "(" else None


def _reconstructor(_name: str, args: list[Node]) -> Node:
    """Node of copyreg._reconstructor(class, object, None), which creates objects in protocols before 2."""
    known = len(args) == 3 and isinstance(args[0], Global) and args[1] == Global("g", "builtins.object")
    return ["o", args[0].name, ["("], None] if known else None


def _enum_by_name(_name: str, args: list[Node]) -> Node:
    """Node of getattr(class, "member"), by which some versions of Python store an enum member."""
    known = len(args) == 2 and isinstance(args[0], Global) and isinstance(args[1], str) and args[1].isidentifier()
    return ["o", args[0].name, ["(", args[1]], None] if known else None


_MAKERS: list[tuple[Any, Callable[[str, list[Node]], Node]]] = [
    (names.DICTS, _dict), (names.LISTS, _container("[")), (names.TUPLES, _container("(")), (names.SETS, _set),
    (names.BYTES, _bytes), (names.STRINGS, _string), (names.TENSORS, _tensor), (names.PARAMETERS, _parameter),
    ((names.TENSOR_SUBCLASS,), _tensor_subclass), ((names.RECONSTRUCTOR,), _reconstructor), ((names.ENUM_BY_NAME,), _enum_by_name),
]  # fmt: skip


def _dict_of_mark(m: Machine) -> None:
    items = m.pop_mark()
    m.push(["{"])
    m.set_items(items)


def _add_to_set(m: Machine) -> None:
    items = m.pop_mark()
    m.top("s", "adds to something that is not a set").extend(items)


def _new_object_with_keywords(m: Machine) -> None:
    if m.pop() != ["{"]:
        raise Refused("makes an object with keyword arguments")
    m.call(m.pop())


class _Opcode(NamedTuple):
    code: bytes
    name: str  # in pickletools
    action: Callable[[Machine], Any]


_OPCODES = [
    # the frame, the stack and its marks
    _Opcode(b"\x80", "PROTO", lambda m: m.take(1)),
    _Opcode(b"\x95", "FRAME", lambda m: m.take(8)),  # a hint for reading ahead
    _Opcode(b"(", "MARK", Machine.mark),
    _Opcode(b"0", "POP", Machine.pop),
    _Opcode(b"1", "POP_MARK", Machine.pop_mark),
    _Opcode(b"2", "DUP", Machine.duplicate),
    # constants and numbers
    _Opcode(b"N", "NONE", lambda m: m.push(None)),
    _Opcode(b"\x88", "NEWTRUE", lambda m: m.push(True)),
    _Opcode(b"\x89", "NEWFALSE", lambda m: m.push(False)),
    _Opcode(b"K", "BININT1", lambda m: m.push(m.number("<B"))),
    _Opcode(b"M", "BININT2", lambda m: m.push(m.number("<H"))),
    _Opcode(b"J", "BININT", lambda m: m.push(m.number("<i"))),
    _Opcode(b"\x8a", "LONG1", lambda m: m.long(m.number("<B"))),
    _Opcode(b"\x8b", "LONG4", lambda m: m.long(m.number("<I"))),
    _Opcode(b"G", "BINFLOAT", lambda m: m.push(m.number(">d"))),
    # text and bytes
    _Opcode(b"X", "BINUNICODE", lambda m: m.push(m.text(m.number("<I")))),
    _Opcode(b"\x8c", "SHORT_BINUNICODE", lambda m: m.push(m.text(m.number("<B")))),
    _Opcode(b"\x8d", "BINUNICODE8", lambda m: m.push(m.text(m.number("<Q")))),
    _Opcode(b"U", "SHORT_BINSTRING", lambda m: m.short_string(m.number("<B"))),
    _Opcode(b"T", "BINSTRING", lambda m: m.short_string(m.number("<I"))),
    _Opcode(b"C", "SHORT_BINBYTES", lambda m: m.push(m.take(m.number("<B")))),
    _Opcode(b"B", "BINBYTES", lambda m: m.push(m.take(m.number("<I")))),
    _Opcode(b"\x8e", "BINBYTES8", lambda m: m.push(m.take(m.number("<Q")))),
    _Opcode(b"\x96", "BYTEARRAY8", lambda m: m.push(m.take(m.number("<Q")))),
    # containers, empty or of the items above the mark
    _Opcode(b"]", "EMPTY_LIST", lambda m: m.push(["["])),
    _Opcode(b"}", "EMPTY_DICT", lambda m: m.push(["{"])),
    _Opcode(b")", "EMPTY_TUPLE", lambda m: m.push(["("])),
    _Opcode(b"\x8f", "EMPTY_SET", lambda m: m.push(["s"])),
    _Opcode(b"l", "LIST", lambda m: m.push(["[", *m.pop_mark()])),
    _Opcode(b"t", "TUPLE", lambda m: m.push(["(", *m.pop_mark()])),
    _Opcode(b"\x91", "FROZENSET", lambda m: m.push(["f", *m.pop_mark()])),
    _Opcode(b"d", "DICT", _dict_of_mark),
    _Opcode(b"\x85", "TUPLE1", lambda m: m.tuple_of(1)),
    _Opcode(b"\x86", "TUPLE2", lambda m: m.tuple_of(2)),
    _Opcode(b"\x87", "TUPLE3", lambda m: m.tuple_of(3)),
    # additions to a container
    _Opcode(b"a", "APPEND", lambda m: m.append([m.pop()])),
    _Opcode(b"e", "APPENDS", lambda m: m.append(m.pop_mark())),
    _Opcode(b"s", "SETITEM", lambda m: m.set_items([m.pop(), m.pop()][::-1])),
    _Opcode(b"u", "SETITEMS", lambda m: m.set_items(m.pop_mark())),
    _Opcode(b"\x90", "ADDITEMS", _add_to_set),
    # the memo
    _Opcode(b"q", "BINPUT", lambda m: m.remember(m.number("<B"))),
    _Opcode(b"r", "LONG_BINPUT", lambda m: m.remember(m.number("<I"))),
    _Opcode(b"\x94", "MEMOIZE", lambda m: m.remember(len(m.memo))),
    _Opcode(b"h", "BINGET", lambda m: m.recall(m.number("<B"))),
    _Opcode(b"j", "LONG_BINGET", lambda m: m.recall(m.number("<I"))),
    # names, and what a pickle would call
    _Opcode(b"c", "GLOBAL", lambda m: m.global_(m.line(), m.line())),
    _Opcode(b"\x93", "STACK_GLOBAL", Machine.stack_global),
    _Opcode(b"R", "REDUCE", lambda m: m.call(m.pop())),
    _Opcode(b"\x81", "NEWOBJ", lambda m: m.call(m.pop())),
    _Opcode(b"\x92", "NEWOBJ_EX", _new_object_with_keywords),
    _Opcode(b"b", "BUILD", Machine.build),
    _Opcode(b"Q", "BINPERSID", Machine.persistent),
]
_ACTIONS = {opcode.code: opcode.action for opcode in _OPCODES}
_REFUSED = {
    b"i": "INST", b"o": "OBJ", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
    b"P": "PERSID", b"S": "STRING", b"V": "UNICODE", b"I": "INT", b"L": "LONG", b"F": "FLOAT", b"g": "GET", b"p": "PUT",
}  # fmt: skip


def check(root: Node, max_cost: int) -> None:
    """Refuse a value that is nested too deeply, contains itself, or would be too large with every shared part written out.

    Args:
        max_cost: bound on the sum of the lengths of strings and bytes plus ``_NODE_COST`` or ``_LIST_COST`` for every
            value.
    """
    known: dict[int, tuple[int, int] | None] = {}  # by identity: cost and height; None while its parts are visited

    def visit(node: Node, depth: int) -> tuple[int, int]:
        if not isinstance(node, (list, tuple)):
            return _NODE_COST + (len(node) if isinstance(node, (str, bytes)) else 0), 0
        key = id(node)
        if key in known:
            found = known[key]
            if found is None:
                raise Refused("contains itself")
        else:
            if depth > MAX_DEPTH:
                raise Refused(f"is nested deeper than {MAX_DEPTH} levels")
            known[key] = None
            cost = height = 0
            for part in node:
                part_cost, part_height = visit(part, depth + 1)
                cost, height = cost + part_cost, max(height, part_height)
                if cost > max_cost:
                    raise Refused(
                        f"comes to more than {max_cost >> 20:,} MiB of values: it has very many, or is a small file for very much data,"
                        " whose shared parts are nested in shared parts"
                    )
            known[key] = found = (cost + _LIST_COST, height + 1)
        if depth + found[1] > MAX_DEPTH + 1:
            raise Refused(f"is nested deeper than {MAX_DEPTH} levels")
        return found

    visit(root, 0)
