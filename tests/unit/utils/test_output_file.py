"""What flags name for output may be anything: a file, a link, a FIFO, a device, a socket, a folder. None is replaced by another kind."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.convert_models import random_model, write_run
from support.paths import ROOT
from support.run_logs import LogWriter

from megatron_sp.commands.cli import main as cli
from megatron_sp.data import corpus
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError, DiskError
from megatron_sp.utils.files import require_place, write_output

sys.path[:0] = [str(ROOT / "benchmarks")]
TEXT = "what is written\n"
CHARACTER_NULL, CHARACTER_FULL, A_DISK = os.makedev(1, 3), os.makedev(1, 7), os.makedev(7, 250)


def node(path: Path, kind: int, device: int) -> None:
    """A device of our own: those of the system are not for tests that would rename over them."""
    try:
        os.mknod(path, kind | 0o600, device)
    except PermissionError:
        pytest.skip("making a device needs root; FIFOs show the same")


@contextlib.contextmanager
def reader(path: Path) -> Iterator[Callable[[], bytes]]:
    """Somebody who reads a FIFO; yields what has come, to be asked once the writer is through."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # here, so that the writer finds a reader
    parts: list[bytes] = []

    def read() -> None:
        os.set_blocking(fd, True)
        while True:
            part = os.read(fd, 1 << 16)
            if part == b"bye":
                return
            parts.append(part.removesuffix(b"bye"))
            if part.endswith(b"bye"):
                return

    writer = os.open(path, os.O_WRONLY)  # the pipe stays open between writers
    thread = threading.Thread(target=read)
    thread.start()

    def all_of_it() -> bytes:
        os.write(writer, b"bye")
        thread.join()
        return b"".join(parts)

    try:
        yield all_of_it
    finally:
        if thread.is_alive():
            all_of_it()
        os.close(writer)
        os.close(fd)


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_output(path, TEXT)
    assert path.read_text() == TEXT
    path.chmod(0o640)
    before = path.stat().st_ino
    write_output(path, b"other")
    assert path.read_bytes() == b"other" and stat.S_IMODE(path.stat().st_mode) == 0o640 and path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays(tmp_path: Path, there: bool) -> None:
    (tmp_path / "other").mkdir()
    target = tmp_path / "other" / "a"
    if there:
        target.write_text("old")
    link = tmp_path / "link"
    link.symlink_to("other/a")
    write_output(link, TEXT)
    assert link.is_symlink() and os.readlink(link) == "other/a" and target.read_text() == TEXT and not target.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "other"] and os.listdir(tmp_path / "other") == ["a"]


def test_a_fifo_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(OSError, match="nobody reads this FIFO"):
        write_output(path, TEXT)
    with reader(path) as read:
        write_output(path, TEXT * 10_000)  # more than a pipe holds
        assert read() == TEXT.encode() * 10_000
    assert stat.S_ISFIFO(path.lstat().st_mode) and os.listdir(tmp_path) == ["fifo"]


def test_devices_are_written_into_and_disks_are_not(tmp_path: Path) -> None:
    node(tmp_path / "null", stat.S_IFCHR, CHARACTER_NULL)
    node(tmp_path / "full", stat.S_IFCHR, CHARACTER_FULL)
    node(tmp_path / "disk", stat.S_IFBLK, A_DISK)
    (tmp_path / "link").symlink_to("null")
    write_output(tmp_path / "null", TEXT)
    write_output(tmp_path / "link", TEXT)
    with pytest.raises(OSError, match="No space"):
        write_output(tmp_path / "full", TEXT)
    with pytest.raises(OSError, match="it is a disk; give a file"):
        write_output(tmp_path / "disk", TEXT)
    kinds = {name: stat.S_IFMT((tmp_path / name).lstat().st_mode) for name in os.listdir(tmp_path)}
    assert kinds == {"null": stat.S_IFCHR, "full": stat.S_IFCHR, "disk": stat.S_IFBLK, "link": stat.S_IFLNK}


def test_a_terminal_is_written_into() -> None:
    master, terminal = os.openpty()
    write_output(os.ttyname(terminal), "one line\n")
    assert os.read(master, 100) == b"one line\r\n"
    os.close(master)
    os.close(terminal)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "link"])
def test_what_is_open_already_is_written_into(tmp_path: Path, name: str) -> None:
    """/dev/stdout is such a name, and what was said before stays."""
    with open(tmp_path / "log", "w") as file:
        file.write("before\n")
        file.flush()
        named = name.format(file.fileno())
        if name == "link":
            named = str(tmp_path / "link")
            os.symlink(f"/proc/self/fd/{file.fileno()}", named)
        inode = os.fstat(file.fileno()).st_ino
        write_output(named, TEXT)
    assert (tmp_path / "log").read_text() == f"before\n{TEXT}" and (tmp_path / "log").stat().st_ino == inode
    with pytest.raises(OSError, match="No such file"):
        write_output(f"/proc/self/fd/{1 << 20}", TEXT)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("absent/file")
    (tmp_path / "a file").touch()
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(tmp_path)  # names of sockets are short
        made.bind("socket")
        os.chdir(here)
    for name, why in (("folder", "it is a folder; give a file"), ("loop", "symbolic links"), ("socket", "it is a socket; give a file")):
        with pytest.raises(OSError, match=why):
            write_output(tmp_path / name, TEXT)
        with pytest.raises(ConfigError, match=f"--json .*{name} cannot be written: .*{why}"):
            require_place(tmp_path / name, "--json")
    for name in ("nowhere", "absent/file", "a file/x", "x" * 300):
        with pytest.raises(OSError):
            write_output(tmp_path / name, TEXT)
        with pytest.raises(ConfigError, match=r"--json .* cannot be written"):
            require_place(tmp_path / name, "--json")
    assert sorted(os.listdir(tmp_path)) == ["a file", "folder", "loop", "nowhere", "socket"]


# All flags of all programs


def command(*words: object) -> Callable[[Path], int]:
    return lambda path: cli([str(w) if w is not PATH else str(path) for w in words])


PATH = object()
SHAPE = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64", "--vocab-size", "512"]

ONE_LAYOUT = "--tp-size 1 --sp-size 2 --cp-size 1 --pp-size 1 --zero-stage 0 --micro-batch-size 1 --sp-overlap-mode none"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a checkpoint, a corpus and a model with a plan, under the names that the commands below use."""
    folder = tmp_path_factory.mktemp("inputs")
    log = LogWriter(folder / "run")
    log.start(0)
    log.steps(1, 3)
    write_run(random_model("gpt2"), folder / "stored")
    lines = [
        json.dumps({"text": f"def f{i}(x): return {'x' * (i % 50)} + {i}\n" * 30, "source": f"lib/p{i % 3}/{i}.py"}) for i in range(60)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "plan.yaml").write_text('schema: 1\nlines:\n  - {on: "0", do: column}\n  - {on: "2", do: row, reduce: all_reduce}\n')
    (folder / "mine_of_outputs.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))\n"
    )
    return folder


def convert(path: Path) -> int:
    target = Path(f"hf-{len(os.listdir())}")
    return cli(["convert", "--input", "stored", "--to", "hf", "--output", str(target), "--report", str(path)])


def evaluate(path: Path) -> int:
    module = importlib.import_module("megatron_sp.commands.evaluate")
    try:
        module.require_place(path, "--json")
        module.report({"loss": 1.0}, {"task": "text"}, str(path))
    except (ConfigError, DiskError) as error:
        return int(error.exit_code)
    return 0


def benchmark(path: Path) -> int:
    try:
        importlib.import_module("common").write_json(str(path), "x", {}, {})
    except OSError:
        return 6
    return 0


def data_set(path: Path) -> int:
    try:
        with IndexedDatasetWriter(str(path).removesuffix(".bin"), vocab_size=100) as writer:
            writer.add_document([1, 2])
    except DiskError:
        return 6
    return 0


def merged(path: Path) -> int:
    with IndexedDatasetWriter("part", vocab_size=100) as writer:
        writer.add_document([1, 2])
    return command("data", "merge", "part", "--output", str(path).removesuffix(".bin"))(path)


MODEL = ("--factory", "mine_of_outputs:make", "--tp", 2)
WRITERS: dict[tuple[str, str], Callable[[Path], int]] = {
    ("megatron_sp/commands/report.py", "--output"): command("report", "run", "-o", PATH),
    ("megatron_sp/commands/plot.py", "--output"): command("plot", "run", "-o", PATH),
    ("megatron_sp/commands/evaluate.py", "--json"): evaluate,
    ("megatron_sp/commands/data.py", "--output of corpus"): command("data", "corpus", "--output", PATH),
    ("megatron_sp/commands/tokenizer.py", "--output"): command("tokenizer", "--input", "corpus.jsonl", "--type", "wordpiece",
                                                   "--vocab-size", 400, "--output", PATH),
    ("megatron_sp/convert/arguments.py", "--report"): convert,
    ("megatron_sp/commands/schedule/__init__.py", "--html"): command("schedule", "show", "plan.yaml", *MODEL, "--html", PATH),
    ("megatron_sp/commands/schedule/__init__.py", "--save"): command("schedule", "show", "plan.yaml", *MODEL, "--save", PATH),
    ("megatron_sp/planner/options.py", "--picture"): command(
        "plan", "--gpus", 2, "--gpu", "h200", "--top", 1, *SHAPE, *ONE_LAYOUT.split(), "--picture", PATH
    ),
    ("megatron_sp/commands/preprocess.py", "--output-prefix"): data_set,
    ("megatron_sp/commands/data.py", "--output"): merged,
    ("benchmarks/common.py", "--json"): benchmark,
}  # fmt: skip
PICTURES = {("megatron_sp/commands/plot.py", "--output"), ("megatron_sp/planner/options.py", "--picture")}  # drawn five times
SUFFIX = {"--picture": ".png"}
PAIRS = {("megatron_sp/commands/preprocess.py", "--output-prefix"), ("megatron_sp/commands/data.py", "--output")}
FOLDERS = {  # what makes a folder, and refuses one that is there
    ("megatron_sp/convert/arguments.py", "--output"), ("megatron_sp/commands/ckpt/__init__.py", "--output"),
}  # fmt: skip
NAMES = ("--output", "--json", "--html", "--report", "--picture", "--save", "--plot", "--out", "--output-prefix", "--svg", "--csv")


def test_every_output_flag_is_in_the_table() -> None:
    found = set()
    for folder in ("tools", "megatron_sp", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent == ROOT / "tools/dev":  # they write pages and pictures of this repository
                continue
            text = path.read_text()
            calls = ast.walk(ast.parse(text)) if any(f'"{name}"' in text for name in NAMES) else ()
            for call in (n for n in calls if isinstance(n, ast.Call)):
                words = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                if set(words) & set(NAMES) and not any(k.arg == "action" for k in call.keywords) and call.keywords:
                    found.add((str(path.relative_to(ROOT)), next(w for w in words if w in NAMES)))
    assert found == {(path, flag.split()[0]) for path, flag in [*WRITERS, *FOLDERS] if path != "benchmarks/common.py"}


@pytest.mark.parametrize(
    "which", [pytest.param(key, id=" ".join(key), marks=pytest.mark.long if key in PICTURES else ()) for key in WRITERS]
)
def test_nothing_is_replaced(which: tuple[str, str], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (which[1] == "--picture" or "plot" in which[0]) and not availability.find("matplotlib").available:
        pytest.skip("needs matplotlib")
    monkeypatch.chdir(inputs)
    monkeypatch.syspath_prepend(str(inputs))
    monkeypatch.setattr(corpus, "LEAST_BYTES", 1)
    monkeypatch.setattr(corpus, "gather", lambda _: [corpus.Document(text=TEXT, source="lib/a.py")])
    write, suffix = WRITERS[which], ".png" if "plot" in which[0] else ".bin" if which in PAIRS else SUFFIX.get(which[1], ".out")
    whole = which not in PAIRS and "tokenizer" not in which[0]  # a pair of files, and one that is read again, are files
    fifo, link, folder, file = (tmp_path / f"{name}{suffix}" for name in ("fifo", "link", "folder", "file"))
    assert write(file) == 0 and file.stat().st_size > 0
    os.mkfifo(fifo)
    assert write(fifo) in (2, 6)
    with reader(fifo) as read:
        assert (write(fifo) == 0) is whole
        assert bool(read()) == whole
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    before = file.stat().st_ino
    link.symlink_to(file.name)
    assert write(link) == 0 and os.readlink(link) == file.name and file.stat().st_ino != before
    folder.mkdir()
    assert write(folder) in (2, 6) and folder.is_dir()
    pairs = [] if whole else [f"{name}.{suffix}" for name in ("fifo", "link", "folder", "file") for suffix in ("idx", "sha256")]
    assert set(os.listdir(tmp_path)) <= {*pairs, *(path.name for path in (fifo, link, folder, file))}
