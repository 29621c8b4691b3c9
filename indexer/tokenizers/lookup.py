"""From a spec to its tokenizer; the last few opened are kept, since several profiles and tasks of a process share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from blake3 import blake3

from indexer.tokenizers.contents import KINDS, Contents, read_file, recognise
from indexer.tokenizers.core import Kind, TextTokenizer, TokenizerSpec
from indexer.tokenizers.huggingface import open_huggingface
from indexer.tokenizers.rank_files import open_tekken, open_tiktoken
from indexer.tokenizers.sentencepiece_model import open_sentencepiece
from packer.format.errors import UsageError

_OPENERS: dict[Kind, Callable[[TokenizerSpec, Contents], TextTokenizer]] = {
    "huggingface": open_huggingface,
    "tiktoken": open_tiktoken,
    "tekken": open_tekken,
    "sentencepiece": open_sentencepiece,
}
_KEPT = 4
_opened: OrderedDict[str, TextTokenizer] = OrderedDict()


def open_tokenizer(spec: TokenizerSpec) -> TextTokenizer:
    """The tokenizer of a file.

    Raises:
        UsageError: the file is missing, cut or of another kind; a package is missing; pattern or special tokens do not fit.
    """
    content = read_file(spec.file)
    key = blake3(content + repr((spec.kind, spec.pattern, spec.special_tokens)).encode()).hexdigest()
    tokenizer = _opened.pop(key, None) or _open(spec, recognise(spec.file, content, spec.kind))
    _opened[key] = tokenizer
    if len(_opened) > _KEPT:
        _opened.popitem(last=False)
    return tokenizer


def _open(spec: TokenizerSpec, contents: Contents) -> TextTokenizer:
    if spec.pattern is not None and contents.kind != "tiktoken":
        raise UsageError(f"pattern is given, but {spec.file} is {KINDS[contents.kind]}, which has its own; leave pattern out")
    return _OPENERS[contents.kind](spec, contents)
