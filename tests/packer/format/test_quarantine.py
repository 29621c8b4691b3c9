import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import BayplanError, FormatError, RecipeError, RowError
from packer.format.quarantine import MAX_LINE_BYTES, QuarantineLine, decode_quarantine, quarantine_text
from packer.format.reasons import EXPLANATIONS, Reason


def line_of(**changes):
    defaults = {
        "source": "web",
        "file": "a/rows.jsonl",
        "byte_offset": 17,
        "sample_id": "s1",
        "reason": Reason.LONE_SURROGATE,
        "detail": "a \\u escape is half of a surrogate pair",
        "line": '{"t":"\\ud83d"}',
    }
    return QuarantineLine(**(defaults | changes))


def test_a_quarantine_line_says_file_offset_id_reason_and_detail():
    assert line_of().encode() == (
        b'{"source":"web","file":"a/rows.jsonl","byte_offset":17,"id":"s1","reason":"lone_surrogate",'
        b'"detail":"a \\\\u escape is half of a surrogate pair","line":"{\\"t\\":\\"\\\\ud83d\\"}"}\n'
    )


@given(st.binary(max_size=300), st.sampled_from(list(Reason)), st.text())
def test_any_line_can_be_quarantined_and_read_back(raw, reason, detail):
    text, truncated = quarantine_text(raw)
    line = line_of(line=text, reason=reason, detail=detail)
    encoded = line.encode()
    assert not truncated
    assert encoded.count(b"\n") == 1
    assert decode_quarantine(encoded, "here") == line


def test_a_detail_with_half_a_surrogate_pair_is_written_escaped():
    assert decode_quarantine(line_of(detail="found \ud83d").encode(), "here").detail == "found \\ud83d"


def test_a_long_line_is_cut_and_marked():
    text, truncated = quarantine_text(b"x" * (MAX_LINE_BYTES + 1))
    assert (len(text), truncated) == (MAX_LINE_BYTES, True)
    assert quarantine_text(b"x" * MAX_LINE_BYTES) == ("x" * MAX_LINE_BYTES, False)
    assert decode_quarantine(line_of(line_truncated=True).encode(), "here").line_truncated
    assert b"line_truncated" not in line_of().encode()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"source":"web"', line_of().encode().replace(b"lone_surrogate", b"unheard_of")]
)
def test_what_is_no_quarantine_line_is_refused_with_its_place(data):
    with pytest.raises(FormatError, match=r"q\.jsonl line 2: not a quarantine line"):
        decode_quarantine(data, "q.jsonl line 2")


def test_every_reason_is_explained_and_codes_never_change():
    assert EXPLANATIONS.keys() == set(Reason)
    assert all(reason.value == reason.name.lower() for reason in Reason)
    assert {reason.value for reason in Reason} >= CODES_OF_VERSION_1


def test_errors_survive_the_way_between_processes():
    import pickle

    row_error = pickle.loads(pickle.dumps(RowError(Reason.EMPTY_IMAGE, "a.png")))
    assert (row_error.reason, row_error.detail, str(row_error)) == (Reason.EMPTY_IMAGE, "a.png", "empty_image: a.png")
    recipe_error = pickle.loads(pickle.dumps(RecipeError(["one", "two"])))
    assert (recipe_error.problems, str(recipe_error)) == (["one", "two"], "one\ntwo")
    assert isinstance(row_error, BayplanError)


CODES_OF_VERSION_1 = set(
    """
    line_too_long invalid_utf8 invalid_json lone_surrogate non_finite_number nesting_too_deep truncated_input kills_worker
    schema_mismatch schema_error placeholder_mismatch unsupported_media empty_sample too_many_images not_writable internal_error
    missing_image unreadable_image reference_outside_root unsupported_reference remote_not_allowed invalid_base64
    empty_image image_too_large not_an_image unsupported_image_format truncated_image corrupt_image too_many_pixels
    image_too_small aspect_ratio conversion_failed
    """.split()
)
