"""Evaluation: every token is scored once, numbers are those of a plain loop over the model's logits, bad lines are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import stored_models

from megatron_sp.commands import evaluate
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.data.bert_dataset import BERTDataset, BERTOptions
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.inference import scoring
from megatron_sp.inference.scoring import RowScore, continuation, encoded, front, windows
from megatron_sp.models.bert import BertModel
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.utils.errors import DataError


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, GPTModel]:
    return stored_models.byte_run(tmp_path)


def call(capsys: pytest.CaptureFixture[str], run: Path, *words: object) -> dict[str, Any]:
    """What the tool writes with --json; it prints the same."""
    out = run.parent / "out.json"
    code = evaluate.main(["--load", str(run), "--device", "cpu", "--json", str(out), *map(str, words)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result: dict[str, Any] = json.loads(out.read_text())
    shown = dict(line.rsplit(maxsplit=1) for line in printed.out.splitlines())
    for name, value in result["results"].items():
        if value is not None:
            assert float(shown[name.replace("_", " ")].replace(",", "")) == pytest.approx(value, rel=1e-5)
    return result


def logprobs(model: GPTModel, tokens: list[int]) -> torch.Tensor:
    """[s, v] after each token, one sequence at a time."""
    with torch.no_grad():
        return model.logits(model.hidden(torch.tensor([tokens]), ForwardContext(AttentionMask())))[:, 0].double().log_softmax(-1)


def plain_loss(model: GPTModel, tokens: list[int], length: int, stride: int) -> list[list[float]]:
    """Losses of each window's new tokens, word for word: token i is predicted in the first window that has it."""
    done, found = {0}, []
    for start in range(0, len(tokens), stride):
        window = tokens[start : start + length + 1]
        told = logprobs(model, window[:-1]) if len(window) > 1 else None
        found.append([])
        for i in range(1, len(window)):
            if start + i not in done:
                done.add(start + i)
                assert told is not None
                found[-1].append(-float(told[i - 1, window[i]]))
    assert done == set(range(len(tokens)))
    return [f for f in found if f]


@pytest.mark.parametrize("number", [2, 3, 7, 8, 9, 10, 23])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (3, 2), (40, 40)])
def test_every_token_but_the_first_is_scored_once(number: int, length: int, stride: int) -> None:
    tokens, scored = list(range(100, 100 + number)), []
    for row in windows(tokens, length, stride):
        assert len(row.tokens) - 1 <= length and row.num_scored >= 1
        if row.first:
            assert row.first == length - stride  # so much context has even the first that counts
        scored += list(row.tokens[row.first + 1 :])
    assert scored == tokens[1:]
    assert list(windows([5], length, stride)) == list(windows([], length, stride)) == []


TEXT = "It was a bright cold day in April, and the clocks were striking thirteen."


@pytest.mark.parametrize("stride", [24, 5])
def test_text_has_the_loss_of_a_plain_loop(run: tuple[Path, GPTModel], tmp_path: Path, stride: int, capsys: Any) -> None:
    path, model = run
    documents = [TEXT, "naïve", TEXT[:30]]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    got = call(capsys, path, "--text", tmp_path / "text.jsonl", "--stride", stride, "--batch-size", 3)
    pieces = [w for t in documents for w in plain_loss(model, [256, *t.encode()], 24, stride)]
    losses = [loss for piece in pieces for loss in piece]
    numbers = got["results"]
    assert numbers["tokens"] == numbers["bytes"] == len(losses) == sum(len(t.encode()) for t in documents)
    assert numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert numbers["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert numbers["bits_per_byte"] == pytest.approx(np.mean(losses) / math.log(2), rel=1e-6)
    assert numbers["windows"] == len(pieces)
    assert (got["task"], got["stride"], got["step"], got["dp"]) == ("text", stride, 2, 1)
    (tmp_path / "text.txt").write_text(TEXT + "\nsecond line\n")  # a plain file is one document
    numbers = call(capsys, path, "--text", tmp_path / "text.txt", "--seq-length", 10)["results"]
    losses = [x for w in plain_loss(model, [256, *f"{TEXT}\nsecond line\n".encode()], 10, 10) for x in w]
    assert numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-6) and numbers["tokens"] == len(losses)


class Begun(ByteTokenizer):
    """Bytes whose texts begin with two tokens."""

    begin = (256, 7)


class Ascii(ByteTokenizer):
    """A tokenizer that drops what it does not know, as one of Hugging Face without a token for it."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.encode("ascii", "ignore").decode())


def test_texts_begin_with_bos_which_is_not_scored() -> None:
    tokens = [*front(Begun()), *b"abcdef"]
    assert list(windows(tokens, 4, 4, 2)) == [([256, 7, *b"abc"], 1), (list(b"cdef"), 0)]
    assert list(windows(tokens[:3], 4, 4, 2)) == [([256, 7, 97], 1)] and list(windows(tokens[:2], 4, 4, 2)) == []
    assert front(ByteTokenizer()) == [256]


@pytest.mark.parametrize(("tokenizer", "context", "text", "length", "tokens", "first"), [
    (ByteTokenizer, "ab  ", "cd", 20, b"ab  cd", 1),  # the context's last spaces count as the text's
    (ByteTokenizer, "abcdef", "gh", 4, b"defgh", 2),  # the first tokens of a context go where it is too long
    (ByteTokenizer, "", "gh", 4, [256, *b"gh"], 0),
    (Begun, "ab ", "cd", 20, [256, 7, *b"ab cd"], 3), (Begun, "", "gh", 20, [256, 7, *b"gh"], 1), (Begun, "abcdef", "gh", 4, b"defgh", 2),
    (Ascii, "ab", "\u65e5c", 20, b"abc", 1),
])  # fmt: skip
def test_a_continuation_has_the_tokens_of_the_whole_text(
    tokenizer: type[ByteTokenizer], context: str, text: str, length: int, tokens: Any, first: int
) -> None:
    assert continuation(tokenizer(), context, text, length, "here") == (list(tokens), first)


def test_a_text_that_is_too_long_or_left_out_is_not_scored() -> None:
    """Without a token of its own, the context's last one was scored instead."""
    with pytest.raises(DataError, match=r"file, line 3: 'abcde\.\.\.' has 5 tokens, the model reads 4 at once"):
        continuation(ByteTokenizer(), "x", "abcde", 4, "file, line 3")
    with pytest.raises(DataError, match="file, line 3: the tokenizer has no token for '\u65e5'"):
        continuation(Ascii(), "ab", "\u65e5", 20, "file, line 3")
    assert encoded(Ascii(), ["\u65e5", "a"], "here") == [[], [97]]
    with pytest.raises(DataError, match="file: the tokenizer has no token for any of it"):
        encoded(Ascii(), ["\u65e5", "\u672c"], "file")


def test_data_are_joined_and_split(run: tuple[Path, GPTModel], tmp_path: Path, capsys: Any) -> None:
    documents = [[*TEXT[i : i + 7 + i].encode(), 256] for i in range(10)]
    with IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for document in documents:
            writer.add_document(np.array(document))
    parts = {(): documents, ("--split", "60,40,0"): documents[6:], ("--split", "60,40", "--part", "train", "--limit", 2): documents[:2]}
    for words, chosen in parts.items():
        numbers = call(capsys, run[0], "--data-path", tmp_path / "data", *words)["results"]
        losses = [x for w in plain_loss(run[1], [t for d in chosen for t in d], 24, 24) for x in w]
        assert numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-6) and numbers["tokens"] == len(losses)
        assert numbers["bits_per_byte"] is None


def test_last_words_and_choices_are_those_of_a_plain_loop(run: tuple[Path, GPTModel], tmp_path: Path, capsys: Any) -> None:
    path, model = run

    def loss(context: str, text: str) -> tuple[float, bool]:
        tokens = [*context.encode(), *text.encode()] if context else [256, *text.encode()]
        tokens = tokens[-25:]  # the beginning goes
        told = logprobs(model, tokens[:-1])[-len(text.encode()) :]
        labels = torch.tensor(tokens[-len(text.encode()) :])
        return -float(told.gather(1, labels[:, None]).sum()), bool((told.argmax(1) == labels).all())

    greedy = bytes(int(logprobs(model, list(b"ab ")).argmax(1)[-1]) for _ in range(1))
    texts = ["ab cd", TEXT, "x " + "yz" * 3]
    (tmp_path / "last.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    numbers = call(capsys, path, "--last-word", tmp_path / "last.jsonl")["results"]
    want = [loss(t.rpartition(" ")[0], " " + t.rpartition(" ")[2]) for t in texts]
    assert numbers["perplexity"] == pytest.approx(math.exp(np.mean([w[0] for w in want])), rel=1e-5)
    assert numbers["accuracy"] == np.mean([w[1] for w in want]) and numbers["items"] == 3
    questions = [
        {"context": "Who is it?", "choices": ["I", "a very long answer", "you"], "answer": 0},
        {"context": "ab ", "choices": ["zz", greedy.decode("latin-1"), "é"], "answer": 1},
        {"context": "", "choices": ["zz", "yyyy"], "answer": 1},
        {"context": TEXT, "choices": ["The end.", "\nNo"], "answer": 0},
    ]
    (tmp_path / "choices.jsonl").write_text("\n".join(json.dumps(q) for q in questions))
    numbers = call(capsys, path, "--choices", tmp_path / "choices.jsonl", "--batch-size", 4)["results"]
    plain, normed = 0, 0
    for q in questions:
        context = str(q["context"])
        between = "" if not context or context[-1] == " " else " "
        kept, moved = context.rstrip(), context[len(context.rstrip()) :]
        texts = [moved + (c if c[0].isspace() else between + c) for c in q["choices"]]  # type: ignore[attr-defined]
        losses = [loss(kept, t)[0] for t in texts]
        plain += int(np.argmin(losses)) == q["answer"]
        normed += int(np.argmin([x / len(c.encode()) for x, c in zip(losses, q["choices"], strict=True)])) == q["answer"]  # type: ignore[call-overload]
    assert (numbers["acc"], numbers["acc_norm"], numbers["items"]) == (plain / 4, normed / 4, 4)
    assert numbers["chance"] == pytest.approx((1 / 3 + 1 / 3 + 1 / 2 + 1 / 2) / 4)


def test_errors_of_the_mean() -> None:
    assert scoring.stderr([1.0]) is None and scoring.clustered_stderr([1.0], [3]) is None
    values = [0.0, 1.0, 1.0, 1.0, 0.0]
    assert scoring.stderr(values) == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))
    # with pieces of one size it is the standard error of the pieces' means
    sums = [4.0, 8.0, 6.0, 5.0]
    assert scoring.clustered_stderr(sums, [2] * 4) == pytest.approx(np.std(np.array(sums) / 2, ddof=1) / 2)
    numbers = scoring.perplexity([RowScore(4000.0, 2, 1), RowScore(4000.0, 2, 0)], None)
    assert numbers["perplexity"] == math.inf and numbers["accuracy"] == 0.25
    assert scoring.last_word([RowScore(1.0, 2, 1), RowScore(1.0, 2, 2)])["accuracy"] == 0.5  # a word is found whole or not


@pytest.mark.parametrize(
    ("read", "line", "message"),
    [
        (scoring.read_documents, "{", "line 2: no JSON"),
        (scoring.read_documents, "[1]", "line 2: must be a JSON object"),
        (scoring.read_documents, '{"txt": "a"}', "line 2: 'text' must be a text, not null (the line has 'txt')"),
        (scoring.read_last_words, '{"text": "word "}', "line 2: 'text' must have at least two words"),
        (scoring.read_choices, '{"context": "a", "choices": ["b"], "answer": 0}', "line 2: 'choices' must be a list of at least two"),
        (scoring.read_choices, '{"context": "a", "choices": ["b", ""], "answer": 0}', "line 2: 'choices'"),
        (scoring.read_choices, '{"context": "a", "choices": ["b", "c"], "answer": 2}', "line 2: 'answer' must be the number of a"),
        (scoring.read_choices, '{"context": "a", "choices": ["b", "c"], "answer": true}', "line 2: 'answer'"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, read: Any, line: str, message: str) -> None:
    good = {"text": "a b", "context": "a", "choices": ["b", "c"], "answer": 0}
    path = tmp_path / "items.jsonl"
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    assert len(read(path, 1)) == 1
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path}, {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--text", "/nowhere.txt"], 4, "/nowhere.txt cannot be read"),
        (["--data-path", "/nowhere"], 4, "/nowhere"),
        (["--text", "x", "--stride", "25"], 2, "--stride (25) must be 1 to --seq-length (24)"),
        (["--text", "x", "--seq-length", "25"], 2, "--seq-length (25) must be 2 to 24"),
        (["--last-word", "x", "--stride", "2"], 2, "--stride needs --data-path or --text"),
        (["--text", "x", "--split", "1,1"], 2, "--split needs --data-path"),
        (["--text", "x", "--json", "/nowhere/out.json"], 2, "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_one_message_and_a_code(run: tuple[Path, GPTModel], words: list[str], code: int, message: str, capsys: Any) -> None:
    assert evaluate.main(["--load", str(run[0]), "--device", "cpu", *words]) == code
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and "Traceback" not in printed.err


def bert_run(folder: Path) -> tuple[Path, BertModel, Config]:
    config = Config()
    config.model = ModelConfig(
        model_family="bert", num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=16, vocab_size=40, init_method_std=0.4
    )
    config.data.tokenizer_type = "NullTokenizer"
    model = BertModel(config.model, config.kernels, seed=3, dtype=torch.float32)
    stored_models.save(folder / "bert", config, {1: model})
    return folder / "bert", model, config


def bert_logprobs(model: BertModel, tokens: list[int], types: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([tokens]), ForwardContext(AttentionMask(causal=False)), types=torch.tensor([types]))
        return model.predictions(hidden)[:, 0].double().log_softmax(-1)


def test_masked_tokens_of_a_data_set(tmp_path: Path, capsys: Any) -> None:
    path, model, config = bert_run(tmp_path)
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for _ in range(9):
            sentences = [random.integers(0, 30, int(random.integers(3, 9))) for _ in range(4)]
            writer.add_document(np.concatenate(sentences), [len(sentence) for sentence in sentences])
    numbers = call(capsys, path, "--data-path", tmp_path / "data", "--split", "1,2,0", "--batch-size", 3)["results"]
    options = BERTOptions(16, config.batch.seed, config.data.mask_prob, config.data.short_seq_prob, binary_head=True)
    dataset = BERTDataset(IndexedDataset(tmp_path / "data"), (3, 9), options, num_samples=None, tokenizer=NullTokenizer(40))
    losses, hits = [], []
    for sample in (dataset[i] for i in range(len(dataset))):
        real = int(sample["length"])
        told = bert_logprobs(model, sample["tokens"][:real].tolist(), sample["types"][:real].tolist())
        for at in np.flatnonzero(sample["loss_mask"][:real]):
            label = int(sample["labels"][at])
            losses.append(-float(told[at, label]))
            hits.append(int(told[at].argmax()) == label)
    assert numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-5) and numbers["tokens"] == len(losses)
    assert numbers["accuracy"] == pytest.approx(np.mean(hits)) and numbers["rows"] == len(dataset)
    assert 0 <= numbers["order_accuracy"] <= 1 and numbers["order_loss"] > 0


def test_pseudo_perplexity_hides_every_token_in_turn(tmp_path: Path, capsys: Any) -> None:
    path, model, _ = bert_run(tmp_path)
    texts = ["5 6 7", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"]  # the second one is cut
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    numbers = call(capsys, path, "--text", tmp_path / "text.jsonl", "--batch-size", 4)["results"]
    pad, cls, sep, mask = 35, 36, 37, 38
    assert NullTokenizer(40).pad == pad
    losses = []
    for piece in ([5, 6, 7], [*range(1, 15)], [15, 16]):
        for at in range(len(piece)):
            seen = [cls, *piece, sep]
            seen[at + 1] = mask
            losses.append(-float(bert_logprobs(model, seen, [0] * len(seen))[at + 1, piece[at]]))
    assert numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-5) and numbers["tokens"] == len(losses) == 19
    assert numbers["pseudo_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert evaluate.main(["--load", str(path), "--device", "cpu", "--last-word", "x"]) == 2
    assert "this is a BERT" in capsys.readouterr().err
