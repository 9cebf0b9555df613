"""Packaging: what megatron_sp needs, and what it can use. The tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The version from the sources, without importing them."""
    found = re.search(
        r'^__version__ = "([^"]+)"', (HERE / "megatron_sp" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    if not found:
        raise RuntimeError("megatron_sp/__init__.py has no line that sets __version__")
    return found.group(1)


def long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


EXTRAS = {
    "hf": ["transformers>=5.3"],  # exchange of weights with Hugging Face; remote code is never run
    "eval": ["lm-eval[hf]>=0.4.9"],  # standard benchmarks of an exported model (docs/how-to/evaluate.md)
    "serve": ["starlette>=0.40", "uvicorn>=0.30"],  # tools/serve.py
    "data": ["pyarrow>=17", "zstandard>=0.22"],  # Parquet, Arrow and .zst for preprocessing
    "log": ["tensorboard>=2.16", "wandb>=0.17"],
    "plot": ["matplotlib>=3.8"],
    "dev": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.5",
        "hypothesis>=6.100",
        "ruff>=0.9",
        "mypy>=1.13",
        "codespell>=2.3",
        "types-PyYAML",
        "pyarrow>=17",
        "zstandard>=0.22",
        "starlette>=0.40",  # small, and without dependencies that are large
        "uvicorn>=0.30",
        "jsonschema>=4.20",
        "kubeflow-trainer-api==2.3.0",  # pydantic models of the manifests in scripts/kubernetes
        "transformers>=5.3; python_version >= '3.11'",  # whose models ours are compared with
        "triton==3.7.1; platform_system == 'Linux'",  # what torch 2.13 asks for; its kernels are interpreted and compiled without a GPU
    ],
    # the documentation site, and its check in scripts/test.sh; MkDocs 2 drops plugins and hooks
    "docs": ["mkdocs>=1.6.1,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1.0,<2"],
    "bench": ["transformers>=5.3", "matplotlib>=3.8"],
    # Compiled against the installed torch: pip install --no-build-isolation -e '.[flash]'. Never needed.
    "flash": ["flash-attn>=2.6; sys_platform == 'linux'"],
}

setup(
    name="megatron-sp",
    version=version(),
    description="Megatron-style pretraining of GPT and BERT in plain PyTorch, with the parallel layers written out by hand",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_sp", "megatron_sp.*"]),
    package_data={
        "megatron_sp.report": ["page.css", "page.js", "scales.js"],
        "megatron_sp.schedule.report": ["picture.css"],
        "megatron_sp.config.flags": ["foreign_flags.txt"],
    },
    python_requires=">=3.10",
    install_requires=[
        # 2.10 has addmm(out_dtype=, out=) and no longer runs code from a crafted weights_only file (CVE-2026-24747); 2.11 is the oldest
        # that is tested: scripts/test_oldest_torch.sh
        "torch>=2.11",
        "numpy>=1.26",
        "einops>=0.8.2",
        "sentencepiece>=0.2.1",  # CVE-2026-1260
        "tokenizers>=0.22",  # BERT's WordPiece
        "safetensors>=0.5",
        "rich>=13.7",
        "pyyaml>=6.0",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-sp = megatron_sp.commands.cli:program"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
