"""Hugging Face's tokenizer files: which token ends a document, where words start, files that are none, and a run that was moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sp.config.rules import normalize, validate
from megatron_sp.config.schema import Config, DataConfig
from megatron_sp.convert.tokenizers import enter_tokenizer, find_files, find_named
from megatron_sp.data.tokenizers import ByteTokenizer, choose_bos, hugging_face
from megatron_sp.data.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_sp.data.tokenizers.kept import find_moved, name_path
from megatron_sp.utils.errors import ConfigError, DataError, ReportedError

PIECES = ["a", "b", "ab", "\u0120", "\u0120a", "\u010a", "<|endoftext|>", "<x>", "[SEP]"]


def byte_level(special: tuple[str, ...] = ("<|endoftext|>",), pieces: list[str] = PIECES) -> dict[str, Any]:
    """A tokenizer.json, written out."""
    plain = [piece for piece in pieces if piece not in special]
    ids = {piece: i for i, piece in enumerate([*plain, *special])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": ids[piece], "content": piece, "special": True, **flags} for piece in special]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = [pair for pair in (["a", "b"], ["\u0120", "a"]) if "".join(pair) in ids]
    model = {"type": "BPE", "vocab": {piece: ids[piece] for piece in plain}, "merges": merges, "byte_fallback": False, "fuse_unk": False,
             "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}  # fmt: skip
    return {"version": "1.0", "truncation": {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
            "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": model}  # fmt: skip


def write(folder: Path, document: dict[str, Any], **beside: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(document))
    if beside:
        (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder


def test_the_end_of_a_document_is_what_the_file_beside_it_says_or_else_a_known_name(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(("<|endoftext|>", "<x>")))
    known = HuggingFaceTokenizer(folder)
    assert known.eod == 7 and known.decode([7]) == "<|endoftext|>"
    assert known.encode("ab a<|endoftext|>b") == [2, 4, 7, 1]  # never truncated, whatever the file asks for
    write(folder, byte_level(("<|endoftext|>", "<x>")), eos_token={"content": "<x>", "lstrip": False}, sep_token="a")
    said = HuggingFaceTokenizer(folder / "tokenizer.json")
    assert (said.eod, said.sep, said.cls) == (8, 0, None)
    assert said.fingerprint() != known.fingerprint()
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<x>"}')
    assert HuggingFaceTokenizer(folder).eod == 8
    (folder / "special_tokens_map.json").unlink()
    write(folder, byte_level(("[SEP]",), [piece for piece in PIECES if piece != "<|endoftext|>"]))
    assert HuggingFaceTokenizer(folder).eod == HuggingFaceTokenizer(folder).sep == 7


def template(*front: str, behind: tuple[str, ...] = ()) -> dict[str, Any]:
    ids = {"<|endoftext|>": 7, "<x>": 8}
    single = [*({"SpecialToken": {"id": piece, "type_id": 0}} for piece in front), {"Sequence": {"id": "A", "type_id": 0}},
              *({"SpecialToken": {"id": piece, "type_id": 0}} for piece in behind)]  # fmt: skip
    special = {piece: {"id": piece, "ids": [ids[piece]], "tokens": [piece]} for piece in (*front, *behind)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


def test_a_text_begins_as_the_template_of_the_file_says(tmp_path: Path) -> None:
    document = byte_level(("<|endoftext|>", "<x>"))
    assert (HuggingFaceTokenizer(write(tmp_path, document)).begin, HuggingFaceTokenizer(tmp_path).bos) == ((), None)
    for front, behind, begin in (
        (("<x>",), (), (8,)),
        (("<x>", "<|endoftext|>"), (), (8, 7)),
        ((), ("<x>",), ()),
        (("<x>",), ("<x>",), (8,)),
    ):
        made = HuggingFaceTokenizer(write(tmp_path, document | {"post_processor": template(*front, behind=behind)}))
        assert made.begin == begin and made.encode("ab") == [2] and made.bos == (8 if begin == (8,) else None)
    write(tmp_path, document | {"post_processor": template("<x>")}, cls_token="<x>")
    assert HuggingFaceTokenizer(tmp_path).begin == (), "BERT's [CLS], which its samples have already"
    write(tmp_path, document | {"post_processor": template("<x>")}, cls_token="<x>", bos_token="<x>")
    assert HuggingFaceTokenizer(tmp_path).begin == (8,)


def test_bos_or_not(tmp_path: Path) -> None:
    document = byte_level(("<|endoftext|>", "<x>"))
    for post_processor, own in ((None, ()), (template("<x>"), (8,))):
        write(tmp_path, document | {"post_processor": post_processor}, bos_token="<x>")
        for bos, begin in ((None, own), (True, (8,)), (False, ())):
            made = HuggingFaceTokenizer(tmp_path)
            choose_bos(made, bos)
            assert made.begin == begin and made.fingerprint() == HuggingFaceTokenizer(tmp_path).fingerprint()
    with pytest.raises(ConfigError, match="--bos: the tokenizer has no token that begins a text"):
        choose_bos(ByteTokenizer(), True)


def test_ids_may_have_holes(tmp_path: Path) -> None:
    document = byte_level()
    document["model"]["vocab"] = {"a": 0, "b": 20}
    document["model"]["merges"] = []
    document["added_tokens"][0]["id"] = 30
    document["model"]["vocab"]["<|endoftext|>"] = 30
    tokenizer = HuggingFaceTokenizer(write(tmp_path, document))
    assert tokenizer.vocab_size == 31 and tokenizer.decode([0, 5, 20]) == "ab"
    with pytest.raises(DataError, match="token id 31: expected 0 to 30"):
        tokenizer.decode([31])


def test_where_words_start(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path, byte_level()))
    vocab = tokenizer._tokenizer.get_vocab()
    ids = np.array([vocab[piece] for piece in ("a", "b", "\u0120a", "b", "\u010a", "a", "<|endoftext|>", "b", "b")])
    assert tokenizer.starts_word(ids).tolist() == [True, False, True, False, True, True, True, True, False]
    document = byte_level(("</s>",), ["a", "\u2581a", "<0x0A>", "b", "</s>"])
    document["pre_tokenizer"] = document["decoder"] = None
    document["model"]["byte_fallback"] = True
    marked = HuggingFaceTokenizer(write(tmp_path, document))
    assert marked.starts_word(np.array([0, 3, 1, 3, 2, 3, 4, 0, 0])).tolist() == [True, False, True, False, True, True, True, True, False]
    document["model"] = {"type": "WordPiece", "vocab": {"a": 0, "##b": 1, "[UNK]": 2, "</s>": 3}, "unk_token": "[UNK]",
                         "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}  # fmt: skip
    document["added_tokens"][0]["id"] = 3
    pieces = HuggingFaceTokenizer(write(tmp_path, document))
    assert pieces.starts_word(np.array([0, 1, 1, 3, 1])).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(("contents", "beside", "message"), [
    (b"", None, "is empty"),
    (b"{}", None, "is not a tokenizer.json"),
    (b"\xff\xfe", None, "is not a tokenizer.json"),
    (b"[" * 100000, None, "is not a tokenizer.json"),
    (None, b"{", r"tokenizer_config.json: is not JSON"),
    (None, b"[" * 100000, r"tokenizer_config.json: is not JSON"),
    (None, b'{"eos_token": "<nobody>"}', "has no token '<nobody>', which the file beside it names as eos_token"),
    (json.dumps(byte_level((), ["a", "b"])).encode(), None, "no token can end a document: it has none of <eod>"),
])  # fmt: skip
def test_files_that_are_no_tokenizer(contents: bytes | None, beside: bytes | None, message: str, tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    if contents is not None:
        (tmp_path / "tokenizer.json").write_bytes(contents)
    if beside is not None:
        (tmp_path / "tokenizer_config.json").write_bytes(beside)
    with pytest.raises(DataError, match=message):
        HuggingFaceTokenizer(tmp_path)


def test_a_file_that_is_absent_or_far_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"tokenizer.json: cannot be read: No such file.*needs a tokenizer.json"):
        HuggingFaceTokenizer(tmp_path)
    write(tmp_path, byte_level())
    monkeypatch.setattr(hugging_face, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="is larger than the 100 bytes"):
        HuggingFaceTokenizer(tmp_path)


def test_merges_and_vocabulary_must_belong_together(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({piece: i for i, piece in enumerate(PIECES)}))
    merges.write_text("#version: 0.2\na b\n\u0120 a\n")
    tokenizer = GPT2BPETokenizer(vocab, merges)
    assert tokenizer.encode("ab a\nb") == [2, 4, 5, 1] and tokenizer.eod == 6 and tokenizer.decode([2, 4]) == "ab a"
    merges.write_text("a b\n\u0120 b\n")
    with pytest.raises(DataError, match=r"merges.txt does not belong to .*vocab.json"):
        GPT2BPETokenizer(vocab, merges)
    merges.write_text("a b\na b c\n")
    with pytest.raises(DataError, match=r"merges.txt:2: expected two pieces with a space between them, found 'a b c'"):
        GPT2BPETokenizer(vocab, merges)
    for damaged, message in ((b"[1]", "must be one JSON object"), (b'{"a": -1}', "must be one"), (b'{"a": 1, "b": 1}', "have the same id"),
                             (b"{", "is not JSON")):  # fmt: skip
        vocab.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            GPT2BPETokenizer(vocab, merges)


def test_flags_of_tokenizers_that_do_not_go_together() -> None:
    def problems(**data: Any) -> str:
        config = Config(data=DataConfig(mock_data=True, **data))
        config.model.num_layers = config.model.hidden_size = config.model.num_attention_heads = config.model.seq_length = 2
        normalize(config)
        try:
            validate(config)
        except ReportedError as error:
            return str(error)
        return ""

    assert "GPT2BPETokenizer needs --vocab-file FILE, its vocab.json, and --merge-file" in problems(merge_file="m")
    assert "HuggingFaceTokenizer needs --tokenizer-model FILE" in problems(tokenizer_type="HuggingFaceTokenizer")
    # scripts name the files of several: those of others are dropped with a line
    assert "--merge-file" not in problems(tokenizer_type="BertWordPieceCase", vocab_file="v", merge_file="m")
    assert "--vocab-file" not in problems(tokenizer_model="a.json", vocab_file="v")


def test_a_moved_run_finds_its_tokenizer(tmp_path: Path) -> None:
    step = tmp_path / "moved" / "checkpoints" / "step-000001"
    (tmp_path / "moved" / "tokenizer").mkdir(parents=True)
    step.mkdir(parents=True)
    file = write(tmp_path / "moved" / "tokenizer", byte_level()) / "tokenizer.json"
    data = DataConfig(tokenizer_model="/gone/tokenizer/tokenizer.json", vocab_file="/gone/v.json")
    find_moved(data, step)
    assert data.tokenizer_model == str(file) and data.vocab_file == "/gone/v.json"
    there = DataConfig(tokenizer_model=str(shutil.copy(file, tmp_path / "tokenizer.json")))
    find_moved(there, step)
    assert there.tokenizer_model == str(tmp_path / "tokenizer.json")
    shutil.move(step, tmp_path / "moved" / "step-000001")  # taken out of its run
    data = DataConfig(tokenizer_model="/gone/tokenizer.json")
    find_moved(data, tmp_path / "moved" / "step-000001")
    assert data.tokenizer_model == str(file)


def test_the_files_of_a_converted_model_name_its_tokenizer(tmp_path: Path) -> None:
    def told(**config: Any) -> DataConfig:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        data = DataConfig()
        enter_tokenizer(data, find_files(tmp_path), Path("/run/tokenizer"))
        return data

    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    assert told().tokenizer_type == told(do_lower_case=True).tokenizer_type == "BertWordPieceLowerCase"
    assert told(do_lower_case=False).tokenizer_type == "BertWordPieceCase"
    for wrong, message in (
        ({"strip_accents": False}, "strip_accents is False, which a vocab.txt cannot say"),
        ({"do_lower_case": 1}, "true or"),
    ):
        with pytest.raises(DataError, match=message):
            told(**wrong)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    data = told()
    assert (data.tokenizer_type, data.vocab_file, data.merge_file) == (
        "GPT2BPETokenizer",
        "/run/tokenizer/vocab.json",
        "/run/tokenizer/merges.txt",
    )
    assert set(find_named([tmp_path / "vocab.json", tmp_path / "merges.txt"])) == {"vocab.json", "merges.txt"}
    (tmp_path / "tokenizer.json").write_text("{}")
    assert told().tokenizer_model == "/run/tokenizer/tokenizer.json"
    assert set(find_named([tmp_path / "tokenizer.json"])) == {"tokenizer.json", "tokenizer_config.json"}
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="holds no tokenizer"):
        name_path(DataConfig(), empty)
