"""The command line: names, values, both dialects, files, and what a mistake looks like from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import ROOT

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.fields import field_kinds
from megatron_sp.config.flags import foreign_flags as dialect
from megatron_sp.config.flags.arguments import config_as_yaml, config_from_args, draft_config
from megatron_sp.config.flags.foreign_flags import meant_by
from megatron_sp.config.flags.settings import MAX_FILE_BYTES, canonical, targets
from megatron_sp.config.schema import GROUPS, Config
from megatron_sp.data.gpt_dataset import split_bounds
from megatron_sp.utils.errors import ConfigError

SOUND = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --train-iters 10 --lr 1e-3"


def parse(more: str | list[str] = "", sound: str = SOUND) -> Config:
    return config_from_args([*sound.split(), *(more.split() if isinstance(more, str) else more)])


def error(more: str | list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(more)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- names and values


def test_every_field_has_its_flag_in_both_spellings() -> None:
    for group, cls in GROUPS.items():
        for name in field_kinds(cls):
            target = targets()[name.replace("_", "-")]
            assert (target.group, target.name, target.negated) == (group, name, False)
    assert canonical("--num_layers") == canonical("--num-layers") == "num-layers"


@pytest.mark.parametrize("text", ["--num-layers 3", "--num_layers 3", "--num-layers=3", "--num_layers=3", "--num-layers 9 --num-layers 3"])
def test_spellings_of_a_value(text: str) -> None:
    assert parse(text).model.num_layers == 3


@pytest.mark.parametrize(("flags", "size"), [
    ("", 100), ("--tokenizer-type NullTokenizer", 101), ("--tokenizer-type NullTokenizer --vocab-size 7", 8),
    ("--tokenizer-type NullTokenizer --eod-id 3", 100),
    ("--tokenizer-type ByteTokenizer --vocab-size 300", 300),
])  # fmt: skip
def test_a_null_tokenizer_by_its_name_has_one_id_more_as_in_megatron(flags: str, size: int, tmp_path: Path) -> None:
    config = parse(flags)
    assert config.model.vocab_size == size
    (tmp_path / "c.yaml").write_text(config_as_yaml(config))
    assert config_from_args(["--config", str(tmp_path / "c.yaml")]).model.vocab_size == size, "a file counts all ids"


def test_switches() -> None:
    assert parse("--bf16").precision.bf16 and not parse().precision.bf16
    assert not parse("--bf16 --no-bf16").precision.bf16
    assert not parse("--bf16=false").precision.bf16
    assert parse().parallel.overlap_grad_reduce and not parse("--no-overlap-grad-reduce").parallel.overlap_grad_reduce
    assert parse("--no-overlap_grad_reduce --overlap-grad-reduce").parallel.overlap_grad_reduce
    assert parse("--no-exit-signal-handler").batch.no_exit_signal_handler
    assert not parse("--no-exit-signal-handler --exit-signal-handler").batch.no_exit_signal_handler
    assert parse("--load x --no-load-optim").checkpoint.no_load_optim


def test_lists() -> None:
    more = "--global-batch-size 8 --rampup-batch-size 2 2 100"
    assert parse(more).batch.rampup_batch_size == (2, 2, 100)
    for quoted in ("2 2 100", "[2 2 100]", "[2, 2, 100]"):
        assert parse(["--global-batch-size", "8", "--rampup-batch-size", quoted]).batch.rampup_batch_size == (2, 2, 100)
    paths = parse("--no-mock-data --data-path 0.3 /a 0.7 /b --split 1")
    assert paths.data.data_path == ("0.3", "/a", "0.7", "/b") and paths.data.split == "1"
    assert parse(["--no-mock-data", "--data-path=/with blank/x"]).data.data_path == ("/with blank/x",)


def test_negative_numbers_are_values() -> None:
    assert "--lr (-1) must be at least 0" in error("--lr -1")
    assert "--lr (-0.5) must be at least 0" in error("--lr -.5")
    assert "--num-layers (-4) must be at least 1" in error("--num-layers=-4")


def test_choices_ignore_case() -> None:
    assert parse("--normalization rmsnorm").model.normalization == "RMSNorm"
    assert parse("--lr-decay-style wsd --lr-wsd-decay-iters 2").optimizer.lr_decay_style == "WSD"


def test_a_beginning_is_not_completed() -> None:
    assert "--num-lay is unknown: did you mean --num-layers" in error("--num-lay 3")


def test_at_most_three_names_are_offered() -> None:
    for name in ("lr", "num", "log", "no", "tensor", "moe", "x"):
        assert len(meant_by(name + "-")) <= 3


def test_several_mistakes_in_one_message() -> None:
    text = error("--num-layesr 3 --lr x --mtp-num-layers 2")
    assert (
        text.startswith("3 things are wrong:\n  1. --num-layesr") and "\n  2. --lr: " in text and "\n  3. --mtp-num-layers 2 is not" in text
    )


# ---------------------------------------------------------------------------------------------------------------- dialects


def test_split_with_blanks() -> None:
    assert split_bounds(draft_config(["--split", "969, 30, 1"])[0].data.split, 1000) == [(0, 969), (969, 999), (999, 1000)]


def test_lengths_in_tokens() -> None:
    base = SOUND.replace("--train-iters 10", "")
    config = parse("--train-tokens 1000 --lr-decay-tokens 640 --lr-warmup-tokens 65", base)
    assert (config.batch.train_samples, config.optimizer.lr_decay_samples, config.optimizer.lr_warmup_samples) == (32, 20, 3)
    assert parse("--train-tokens 320 --train-samples 900", base).batch.train_samples == 10
    assert parse("--train-tokens 32000 --train-samples 900", base).batch.train_samples == 900
    steps = parse("--global-batch-size 4 --lr-warmup-tokens 129 --train-tokens 500")
    assert (steps.batch.train_iters, steps.optimizer.lr_warmup_iters) == (4, 2)  # 32 * 4 = 128 tokens a step
    assert "--lr-warmup-tokens with --train-iters needs a constant --global-batch-size" in error("--lr-warmup-tokens 9")
    short = parse("--train-tokens 1000 --lr-decay-tokens 640 --lr-warmup-tokens 65 --seq-length-curriculum fixed_discrete 8:5 32", base)
    assert (short.batch.train_tokens, short.batch.train_samples, short.optimizer.lr_decay_samples) == (1000, None, None)
    assert (short.optimizer.lr_decay_tokens, short.optimizer.lr_warmup_tokens) == (640, 65), "samples have several lengths"
    with pytest.raises(ConfigError, match="--train-tokens needs --seq-length"):
        parse("--train-tokens 9", "--lr 1")


def test_ignored_flags_are_collected_with_their_reason() -> None:
    config = parse("--use-mcore-models --transformer-impl local --local_rank=3 --deepspeed --log-throughput --mlp-type standard")
    flags = [note.split(" ")[0] for note in config.ignored_flags]
    assert flags == ["--use-mcore-models", "--transformer-impl", "--local_rank", "--deepspeed", "--log-throughput", "--mlp-type"]
    assert all(note.endswith(")") and " (" in note for note in config.ignored_flags)


def test_no_name_is_in_two_tables() -> None:
    tables = [set(targets()), set(dialect.REWRITTEN), set(dialect.IGNORED_SWITCHES), set(dialect.IGNORED_VALUES), set(dialect.REFUSED)]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
    assert all(name == canonical(name) for name in names)
    assert set(dialect.IGNORED_LISTS) <= set(dialect.IGNORED_VALUES)
    assert set(dialect.HARMLESS_VALUES) <= set(dialect.REFUSED)
    assert {meaning.flag for meanings in dialect.REWRITTEN.values() for meaning in meanings} <= set(targets())


def test_every_name_of_the_tables_gets_its_own_answer() -> None:
    ignored = [*dialect.IGNORED_SWITCHES, *(f"{name} 1" for name in dialect.IGNORED_VALUES)]
    notes = parse(" ".join(f"--{words}" for words in ignored)).ignored_flags
    assert [note.partition(" (")[0] for note in notes] == [f"--{words.removesuffix(' 1')}" for words in ignored]
    idle, refused = [name for name in dialect.REFUSED if name in dialect.COMPANIONS], dialect.REFUSED.keys() - dialect.COMPANIONS.keys()
    assert all(f"--{name} (without --" in note for name, note in zip(idle, parse(f"--{' x --'.join(idle)} x").ignored_flags, strict=True))
    for more in ("", " surely"):
        text = error(" ".join(f"--{name}{more}" for name in sorted(refused)))
        assert [
            name for name in refused if f". --{name}{more} is not supported: " not in text and name not in dialect.HARMLESS_VALUES
        ] == []


# ------------------------------------------------------------------------------------------------------------------- files


def from_file(tmp_path: Path, text: str | bytes, more: str = "", sound: str = SOUND) -> Config:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return parse(f"--config {path} {more}", sound)


def test_a_file_flat_and_grouped_with_both_spellings(tmp_path: Path) -> None:
    text = """
        num-layers: 3
        hidden_size: 64
        model: {num-attention-heads: 4, seq_length: 32, num-key-value-heads: 2}
        optimizer:
            optimizer: sgd
            lr: 1e-4
        bf16: true
        mock_data: yes
        no-overlap-grad-reduce: true
        vocab-size: 100
        train_iters: 1_0
        global-batch-size: 4
        rampup-batch-size: [1, 1, 50]
        transformer-impl: local
        use-mcore-models: false
        use-distributed-optimizer: false
        use-rotary-position-embeddings: true
        wandb-project: null
        data-path: []
    """
    config = from_file(tmp_path, text, sound="")
    assert (config.model.num_layers, config.model.num_query_groups, config.model.position_embedding_type) == (3, 2, "rope")
    assert (config.optimizer.optimizer, config.optimizer.lr, config.precision.bf16) == ("sgd", 1e-4, True)
    assert not config.parallel.overlap_grad_reduce and config.batch.train_iters == 10 and config.batch.rampup_batch_size == (1, 1, 50)
    assert config.data.data_path == () and config.logging.wandb_project is None
    (ignored,) = config.ignored_flags
    assert ignored.startswith(
        "run.yaml line 15: transformer-impl (which kernels run is decided by what the machine has, and by --fused-kernels"
    )


def test_the_command_line_comes_after_the_file_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("lr: 0.5\nbf16: true\nseed: 7\n")
    config = config_from_args([*SOUND.split(), "--no-bf16", f"--config={path}"])
    assert (config.optimizer.lr, config.precision.bf16, config.batch.seed) == (1e-3, False, 7)


def test_a_later_file_comes_over_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr: 0.5\nbf16: true\nseed: 7\n")
    (tmp_path / "b.yaml").write_text("seed: 8\nnum-layers: 3\n")
    config = config_from_args(
        [*SOUND.split(), "--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}", "--num-layers", "4"]
    )
    assert (config.optimizer.lr, config.precision.bf16, config.batch.seed, config.model.num_layers) == (1e-3, True, 8, 4)


@pytest.mark.parametrize(("text", "expected"), [
    ("num_layesr: 3", "run.yaml line 1: num_layesr is unknown: did you mean num-layers?"),
    ("lr: 1\n\nlr-warmup: 3", "run.yaml line 3: lr-warmup is unknown"),
    ("modelz:\n  num_layers: 3", "run.yaml line 1: modelz is not a group of flags; the groups are model, parallel"),
    ("model:\n  num_layers: three", "run.yaml line 2: num_layers: expected an integer, got 'three'"),
    ("lr: [1, 2]", "run.yaml line 1: lr: expected a number, got 1 2"),
    ("bf16: 3", "run.yaml line 1: bf16: expected true or false, got '3'"), ("lr: {a: 1}", "lr is not a group of flags"),
    ("data-path: [[a]]", "the value of data-path must be a word"),
    ("model: {data-path: {a: b}}", "the value of data-path must be a word"), ("lr: 1\nlr: 2", "run.yaml line 2: lr is given twice"),
    ("num_layers: 1\nnum-layers: 2", "run.yaml line 2: num-layers is given twice"),
    ("- lr\n- 1", "run.yaml line 1: expected lines of 'flag: value'"),
    ("just words", "run.yaml line 1: expected lines of 'flag: value'"), ("[a]: 1", "expected the name of a flag"),
    ("lr: 'x", "line 1: not YAML"), ("a: b: c", "line 1: not YAML"), ("lr: 1\n---\nlr: 2", "not YAML"),
    ("lr: !!python/object/apply:os.getcwd []", "the value of lr must be a word"),
    ("!!python/object:os.x {lr: 1}", "expected lines of 'flag: value'"),
    ("model: !!python/object:os.x {num_layers: 1}", "line 1: expected lines of 'flag: value' under model"),
    ("lr: !!python/name:os.system x", "the value of lr must be a word"),
    ("? !!python/object:os.x lr\n: 1", "expected the name of a flag"),
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "the value of b must be a word"), ("[" * 60000, "nested too deeply"),
    ("- " * 60000, "nested too deeply"), ("? " * 60000, "nested too deeply"), (b"lr: \xff\xfe", "not UTF-8"),
    ("#" * (MAX_FILE_BYTES + 1), "this is not a file of flags"),
    ("config: other.yaml", "run.yaml line 1: config belongs on the command line"), ("print-config: true", "belongs on the command line"),
    ("mtp-num-layers: 2", "run.yaml line 1: mtp-num-layers 2 is not supported"), ("load: ''", "load: expected a text, got an empty text"),
    ("lr: -1", "--lr (-1) must be at least 0"),
])  # fmt: skip
def test_wrong_files(tmp_path: Path, text: str | bytes, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text, sound="--num-layers 2" if expected.startswith("--lr") else SOUND.replace("--lr 1e-3", ""))
    assert expected in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read: No such file" in error(f"--config {tmp_path}/none.yaml")
    assert "cannot be read: Is a directory" in error(f"--config {tmp_path}")


@pytest.mark.parametrize("text", ["", "# nothing\n", "null"])
def test_an_empty_file_is_no_flags(tmp_path: Path, text: str) -> None:
    assert from_file(tmp_path, text) == parse()


def test_the_printed_configuration_reads_back_to_the_same(tmp_path: Path) -> None:
    config = parse(
        ["--data-path", "0.5", "/a b", "0.5", "-3", "--no-mock-data", "--split", "1, 2, 3", "--rampup-batch-size", "1", "1", "9"]
        + ["--global-batch-size", "4", "--wandb-project", "null", "--wandb-exp-name", "007", "--adam-eps", "1e-30", "--fp16", "--swiglu"]
        + ["--save", "yes", "--load", "ünicode: #x", "--initial-loss-scale", "65536", "--use-mcore-models"]
    )
    text = config_as_yaml(config)
    assert text.startswith("# ignored: --use-mcore-models (")
    assert from_file(tmp_path, text, sound="") == config


# ----------------------------------------------------------------------------------------------------------- as a program

_PROGRAM = """
import sys
from megatron_sp.commands.pretrain import parse_config
try:
    config = parse_config(prog="train.py", description="Trains.")
    print(config.model.num_layers, config.parallel.zero_stage)
finally:
    heavy = [name for name in ("torch", "numpy", "einops", "rich") if name in sys.modules]
    print("LOADED", heavy, file=sys.stderr) if heavy else None
"""


def test_neither_an_answer_nor_a_mistake_loads_torch_or_numpy(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1}')
    for more, code, out, err in (
        ("--num-layesr 3", 2, "", "error: --num-layesr is unknown: did you mean --num-layers?\n"),
        (f"--deepspeed_config {tmp_path}/ds.json", 0, "2 1\n", ""),
    ):
        command, env = [sys.executable, "-c", _PROGRAM, *SOUND.split(), *more.split()], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """What a program answers to words and variables: exit code (of a run 0), output, errors."""

    def call(*words: str, **env: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                parse_config(words, prog="train.py", description="Trains.")
                code: object = 0
            except SystemExit as end:
                code = end.code
        captured = capsys.readouterr()
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return call


def test_only_rank_0_speaks(answer: Callable[..., tuple[int, str, str]]) -> None:
    for words in (["--nonsense"], ["--help"], [*SOUND.split(), "--print-config"]):
        loud, quiet = answer(*words, RANK="0", WORLD_SIZE="2"), answer(*words, RANK="1", WORLD_SIZE="2")
        assert loud[0] == quiet[0] == (2 if words == ["--nonsense"] else 0)
        assert quiet[1:3] == ("", "") and (loud[1] or loud[2])


def test_help_names_every_flag_with_unit_and_default(answer: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = answer("--help", COLUMNS="100")
    assert (code, err) == (0, "")
    assert out.startswith("usage: train.py") and "Trains." in out and out.index("--num-layers INT") < out.index("--num-experts INT")
    text = " ".join(out.split())
    words = set(text.replace(",", " ").split())
    for cls in GROUPS.values():
        assert cls.__doc__ is not None and cls.__doc__ in text
        for name, kind in field_kinds(cls).items():
            is_on = kind.base == "bool" and cls.__dataclass_fields__[name].default is True
            assert f"--{'no-' if is_on else ''}{name.replace('_', '-')}" in words
    assert "--num-layers INT transformer blocks (required)" in text and "so many steps [steps; default: 100]" in text
    assert "--swiglu gated SiLU MLP --geglu" in text and "{None}" not in out and "None" not in words and "False" not in words
    assert "--num-query-groups, --num-key-value-heads INT key/value heads" in text and "--model-family {gpt,bert} what is trained" in text


@pytest.mark.parametrize("columns", [60, 100])
def test_help_fits_the_terminal_and_breaks_no_flag(columns: int, answer: Callable[..., tuple[int, str, str]]) -> None:
    lines = answer("--help", COLUMNS=str(columns))[1].splitlines()
    names = [line for line in lines if re.match(r"  -", line)]  # a flag's own line is as long as its names and choices
    assert len(names) > 150 and max(len(line) for line in lines if line not in names) <= columns
    assert not [line for line in lines if line.endswith("-")]


def test_help_into_a_closed_pipe_is_silent() -> None:
    command = f"{sys.executable} -c '{_PROGRAM}' --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.startswith("usage: train.py") and "Traceback" not in done.stderr


def test_world_size_comes_from_the_launcher(answer: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = answer(*SOUND.split(), "--global-batch-size", "3", WORLD_SIZE="2")
    assert code == 2 and "(1 * 2 = 2): 3 = 1 * 2 + 1" in err
    assert answer(*SOUND.split(), "--global-batch-size", "3", "--print-config", WORLD_SIZE="3")[0] == 0
    code, _, err = answer(*SOUND.split(), WORLD_SIZE="many")
    assert code == 2 and "WORLD_SIZE is 'many', not a number" in err


def test_print_config_goes_back_in(answer: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = answer(*SOUND.split(), "--bf16", "--print-config")
    assert code == 0 and err == ""
    (tmp_path / "again.yaml").write_text(out)
    assert answer("--config", str(tmp_path / "again.yaml"), "--print-config")[1] == out
