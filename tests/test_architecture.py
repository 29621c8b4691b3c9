"""Who may import whom, what imports cost, and that the tested versions are pinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def roots_loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running some code."""
    show = "import json, sys; print(); print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache", "--config", "pyproject.toml"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_importing_the_plugin_loads_neither_ray_nor_pipelines_nor_torch() -> None:
    assert roots_loaded_by("import plugin").isdisjoint({"ray", "pipelines", "torch"})


def test_reading_loads_no_engine_and_no_arrow() -> None:
    """A trainer's workers, spawned ones too, start with nothing but the reader."""
    code = """
import tempfile
from plugin import BundleReader, FileMissing, ImageRead, PrefetchPool
reader = BundleReader(tempfile.gettempdir())
request = ImageRead(source="none", entry={"bundle": "none.zip", "offset": 0, "size": 1, "crc32": 0})
try:
    PrefetchPool(reader).submit("x", [request]).get()
except FileMissing:
    print("refused")
"""
    loaded = roots_loaded_by(code)
    assert {"plugin", "packer", "fsspec"} <= loaded
    assert loaded.isdisjoint({"torch", "megatron", "ray", "pyarrow", "numpy", "PIL", "pydantic", "indexer", "pipelines", "s3fs"})


def test_what_the_plugin_exports_is_there() -> None:
    import plugin

    assert list(plugin.__all__) == sorted(plugin.__all__)
    assert plugin.__all__ == list(plugin._MODULES)
    for name in plugin.__all__:
        assert getattr(plugin, name).__name__ == name
    assert set(plugin.__all__) <= set(dir(plugin))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        plugin.nothing  # noqa: B018


def test_help_is_quick() -> None:
    code = """
import contextlib
from pipelines.cli import main
for words in (["--help"], ["pack", "--help"], ["recipe", "check", "--help"], ["image-tokens", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
"""
    loaded = roots_loaded_by(code)
    assert "click" in loaded
    assert loaded.isdisjoint({"torch", "ray", "megatron", "pyarrow", "pydantic", "rich", "fsspec", "PIL", "numpy"})


def test_packer_loads_no_engine() -> None:
    loaded = roots_loaded_by("import packer.convert, packer.verify, packer.retry")
    assert loaded.isdisjoint({"ray", "torch", "megatron", "pipelines", "pydantic"})


def test_image_rules_need_numpy_alone() -> None:
    loaded = roots_loaded_by("import indexer.image_rules")
    assert "numpy" in loaded
    assert loaded.isdisjoint({"ray", "torch", "megatron", "pipelines", "plugin", "pydantic", "fsspec", "PIL", "pyarrow"})


def test_the_index_is_read_without_pandas_or_an_engine() -> None:
    code = """
import tempfile
from index_rows import FINGERPRINT, PROFILE, make_rows, write_parts
from indexer.table import consolidate, open_index
from packer.storage import LocalStorage
with tempfile.TemporaryDirectory() as folder:
    storage = LocalStorage(folder, fsync=False)
    consolidate(storage, PROFILE, "web", write_parts(storage, [make_rows([1, 0])]), FINGERPRINT)
    table = open_index(folder, PROFILE)
    table.row(1), table.find("a"), table.usable, table.column("images")
"""
    loaded = roots_loaded_by(f"import sys; sys.path.append({str(ROOT / 'tests' / 'support')!r})\n{code}")
    assert "pyarrow" in loaded
    assert loaded.isdisjoint({"ray", "torch", "megatron", "pipelines", "plugin", "pydantic", "PIL", "pandas"})


def test_tokenizers_need_the_package_of_their_file_alone() -> None:
    loaded = roots_loaded_by("import indexer.tokenizers")
    assert "tokenizers" in loaded
    assert loaded.isdisjoint({"tiktoken", "regex", "sentencepiece", "transformers", "ray", "torch", "pipelines", "plugin", "PIL"})


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = ["s3", "energon", "sentencepiece", "tiktoken", "test"]
    wanted = [*project["dependencies"], *(line for name in tested for line in extras[name])]
    names = {re.split(r"[\[<>=]", line)[0].lower() for line in wanted} - {"bayplan"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.lower().split("==") for line in lines)
    assert pins.keys() == names
    assert pins["torch"] == "2.13.0"
