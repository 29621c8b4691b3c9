"""`cost_model`: a cost model by the names of two presets, or from a file."""

from __future__ import annotations

import os
from pathlib import Path

from indexer.image_rules.lookup import nearest
from packer.format.errors import UsageError
from plugin.cost.core import CostModel
from plugin.cost.files import SUFFIXES, read_cost_model
from plugin.cost.presets import ENCODERS, LLMS
from plugin.cost.shapes import Work, from_shapes


def cost_model(name_or_file: str | os.PathLike[str], work: Work | None = None) -> CostModel:
    """`ENCODER+LLM`, two names of `ENCODERS` and `LLMS`, or the path of a file (.json, .yaml, .yml).

    Args:
        work: for presets only; a file says it itself.

    Raises:
        UsageError: an unknown name, or `work` for a file.
        FormatError: a file that is not what docs/cost.md says.
    """
    name = os.fspath(name_or_file)
    if Path(name).suffix.lower() in SUFFIXES:
        if work is not None:
            raise UsageError(f"found {work} for the cost model in {name}, expected it in the file: under `shapes`, key `work`")
        return read_cost_model(name)
    encoder, plus, llm = name.partition("+")
    if not plus:
        raise UsageError(
            f"found the cost model {name!r}, expected ENCODER+LLM as in qwen3_vl_vit+qwen3_8b, or a file ending in "
            f"{', '.join(SUFFIXES)}; encoders: {', '.join(ENCODERS)}; language models: {', '.join(LLMS)}"
        )
    if encoder not in ENCODERS:
        raise UsageError(f"found no encoder {encoder!r}{nearest(encoder, ENCODERS)}")
    if llm not in LLMS:
        raise UsageError(f"found no language model {llm!r}{nearest(llm, LLMS)}")
    source = f"encoder: {ENCODERS[encoder].source}; language model: {LLMS[llm].source}"
    return from_shapes(ENCODERS[encoder].shape, LLMS[llm].shape, work, name=name, source=source)
