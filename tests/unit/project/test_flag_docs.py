"""docs/reference/flags.md is what the dataclasses say."""

from __future__ import annotations

import importlib.util

from support.paths import ROOT

from megatron_sp.config.fields import field_kinds
from megatron_sp.config.schema import GROUPS


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_flag_docs", ROOT / "tools/dev/make_flag_docs.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs/reference/flags.md").read_text(encoding="utf-8") == tool.page(), "run: make docs"


def test_every_flag_and_alias_is_on_it() -> None:
    text = (ROOT / "docs/reference/flags.md").read_text(encoding="utf-8")
    for cls in GROUPS.values():
        for name in field_kinds(cls):
            flag = name.replace("_", "-")
            assert f"`--{flag}`" in text or f"`--no-{flag}`" in text
            assert all(f"`--{alias}`" in text for alias in cls.__dataclass_fields__[name].metadata["aliases"])


def test_a_switch_that_is_on_says_what_turning_it_off_means() -> None:
    """--help and the page list it as --no-..., next to what it does while it is on."""
    for cls in GROUPS.values():
        for name, kind in field_kinds(cls).items():
            item = cls.__dataclass_fields__[name]
            if kind.base == "bool" and item.default is True:
                assert f"--no-{name.replace('_', '-')}: " in item.metadata["help"]


def test_the_parallel_flags_explain_themselves() -> None:
    """Each size says what tp, sp, cp and dp mean; the two flags whose names differ by one word point at each other."""
    fields = GROUPS["parallel"].__dataclass_fields__
    assert "tp * sp * cp * dp" in (GROUPS["parallel"].__doc__ or "")
    assert fields["tensor_model_parallel_size"].metadata["help"].startswith("tp: ")
    assert fields["sequence_parallel_size"].metadata["help"].startswith("sp: ")
    assert fields["context_parallel_size"].metadata["help"].startswith("cp: ")
    assert fields["context_parallel_size"].metadata["aliases"] == ("cp-size",)
    assert fields["sequence_parallel_size"].metadata["aliases"] == ("ds-sequence-parallel-size", "sp-size")
    assert "--sequence-parallel-size" in fields["sequence_parallel"].metadata["help"]
    for name in ("sp_overlap_comm", "split_qkv_linear", "sp_overlap_mode"):
        assert "sp > 1" in fields[name].metadata["help"], "they mean nothing without it"
    for name in ("cp_chunks", "cp_stages_ahead", "cp_keep_kv"):
        assert "with cp > 1" in fields[name].metadata["help"]
