import errno
import gc
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import storage
from packer.format.errors import RowError, StorageFault
from packer.format.reasons import Reason
from packer.references import ReferenceReader, ReferenceRules, confined, safe_ref, stored_ref
from packer.refusals import row_error, with_row_errors


def make_reader(root, *, archive=None, max_bytes=1000, allow_hosts=()):
    image_root = None if root is None else str(root)
    rules = ReferenceRules(image_root=image_root, archive=archive, allow_hosts=allow_hosts, max_bytes=max_bytes)
    return ReferenceReader(rules)


def refusal(reader, ref):
    with pytest.raises(RowError) as caught:
        reader.read(ref)
    assert "\n" not in caught.value.detail
    return caught.value.reason, caught.value.detail


@pytest.fixture
def root(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(b"outside")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "b.jpg").write_bytes(b"image bytes")
    return root


@pytest.mark.parametrize("ref", ["a/b.jpg", "./a/b.jpg", "a//b.jpg", "a/../a/./b.jpg", "x/../a/b.jpg", "././/a/b.jpg"])
def test_a_relative_path_starts_at_the_root_wherever_the_process_stands(root, ref, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert make_reader(root).read(ref) == b"image bytes"
    assert make_reader(f"file://{root}/").read(ref) == b"image bytes"


@pytest.mark.parametrize(
    "name", ["100%.jpg", "a..b", "...", "back\\slash", "std::vector.png", "colon:1", "사진 é?x=1#2.jpg", " sp ", "%2e"]
)
def test_unusual_names_inside_the_root_are_read_as_they_stand(root, name):
    (root / name).write_bytes(b"odd")
    assert make_reader(root).read(name) == b"odd"
    assert make_reader(root).read(f"a/../{name}") == b"odd"


def test_a_folder_may_end_with_an_exclamation_mark(root):
    (root / "wow!").mkdir()
    (root / "wow!" / "x.jpg").write_bytes(b"wow")
    assert make_reader(root).read("wow!/x.jpg") == b"wow"


def test_absolute_paths_and_file_urls_may_leave_the_root(root, tmp_path):
    outside = tmp_path / "secret.jpg"
    assert make_reader(root).read(str(outside)) == b"outside"
    assert make_reader(root).read(f"file://{outside}") == b"outside"
    assert make_reader(None).read(f"FILE://{outside}") == b"outside"


@pytest.mark.parametrize(
    "ref",
    [
        "../secret.jpg",
        "a/../../secret.jpg",
        "%2e%2e/secret.jpg",
        "..%2fsecret.jpg",
        "%252e%252e%252fsecret.jpg",
        "..\\secret.jpg",
        "a/..\\..\\secret.jpg",
        "./.././secret.jpg",
        "a/%5c..%5c..\\../secret.jpg",
        "..",
        "a/b/../../..",
    ],
)
def test_a_relative_path_may_not_climb_out(root, ref):
    reason, detail = refusal(make_reader(root), ref)
    assert reason is Reason.REFERENCE_OUTSIDE_ROOT
    assert "climbs out" in detail


_STEPS = [
    "..",
    ".",
    "a",
    "b.jpg",
    "secret.jpg",
    "root",
    "%2e%2e",
    "%2E.",
    "..%2f..",
    "%252e%252e%252f",
    "..\\",
    "%5c..",
    "",
    "%",
    ".%2e",
]


@given(st.lists(st.sampled_from(_STEPS), min_size=1, max_size=7), st.sampled_from(["/", "\\", "%2f", "//"]))
def test_no_relative_reference_ever_stands_outside_the_root(steps, separator):
    try:
        path = confined(separator.join(steps).lstrip("/"))
    except RowError:
        return  # that everything inside is read, the tests above say
    for _ in range(4):
        assert (os.path.normpath(f"/up/base/{path}") + "/").startswith("/up/base/")
        path = unquote(path).replace("\\", "/")


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_but_never_crashes(text):
    with pytest.raises(RowError):
        make_reader("/no/such/base/anywhere").read(text)


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        ("a/b", Reason.MISSING_IMAGE),  # the extension was left out
        ("a/b.jpg/", Reason.MISSING_IMAGE),
        ("a/b.jpg/c.jpg", Reason.MISSING_IMAGE),
        ("nowhere.jpg", Reason.MISSING_IMAGE),
        ("x" * 300, Reason.MISSING_IMAGE),
        ("a", Reason.UNREADABLE_IMAGE),
        (".", Reason.UNREADABLE_IMAGE),
        ("loop.jpg", Reason.UNREADABLE_IMAGE),
        ("fifo.jpg", Reason.UNREADABLE_IMAGE),
        ("device.jpg", Reason.UNREADABLE_IMAGE),
        ("socket.jpg", Reason.UNREADABLE_IMAGE),
        ("empty.jpg", Reason.EMPTY_IMAGE),
        ("large.jpg", Reason.IMAGE_TOO_LARGE),
    ],
)
def test_what_is_no_readable_file_is_refused_naming_its_place_below_the_root(root, ref, reason, monkeypatch):
    (root / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(root / "fifo.jpg")
    (root / "device.jpg").symlink_to("/dev/zero")
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")  # an absolute path may be longer than a socket's name can be
    (root / "empty.jpg").touch()
    (root / "large.jpg").write_bytes(bytes(1001))
    found, detail = refusal(make_reader(root), ref)
    assert (found, detail.startswith("<image_root>"), str(root) in detail) == (reason, True, False)
    if reason is Reason.IMAGE_TOO_LARGE:
        assert "1001 bytes, expected at most 1000" in detail


def test_an_image_of_exactly_the_limit_is_read(root):
    (root / "large.jpg").write_bytes(bytes(1000))
    assert len(make_reader(root).read("large.jpg")) == 1000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_unreadable(root):
    (root / "a" / "b.jpg").chmod(0)
    assert refusal(make_reader(root), "a/b.jpg")[0] is Reason.UNREADABLE_IMAGE


def test_a_fault_of_a_store_does_not_quote_its_secrets(monkeypatch):
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0,))

    def failing():
        raise OSError(errno.EIO, "GET https://h/a?sig=s3cret failed")

    with pytest.raises(StorageFault, match=r"^az://c/a\.jpg: OSError") as caught:
        with_row_errors(failing, "az://u:s3cret@c/a.jpg?sig=s3cret")
    assert "s3cret" not in str(caught.value)


def test_permission_errors_of_any_store_say_unreadable():
    assert row_error(PermissionError("403"), "s3://b/k.jpg").reason is Reason.UNREADABLE_IMAGE
    assert row_error(PermissionError(errno.EACCES, "no"), "/a.jpg").reason is Reason.UNREADABLE_IMAGE


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_faults_that_may_pass_are_tried_again_then_become_a_storage_fault(number, monkeypatch):
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0, 0.0))
    tries = []

    def failing(times):
        tries.append(times)
        if len(tries) <= times:
            raise OSError(number, os.strerror(number))
        return b"data"

    assert with_row_errors(lambda: failing(2), "/x") == b"data"
    tries.clear()
    with pytest.raises(StorageFault, match="/x"):
        with_row_errors(lambda: failing(3), "/x")


@pytest.mark.parametrize(
    "ref", ["", "   ", "\n", None, 7, ["a"], "a\0b.jpg", "/a\0b.jpg", "memory://a\0b", "\ud83d.jpg", "/\ud83d.jpg"]
)
def test_what_cannot_be_a_reference_is_refused(root, ref):
    assert refusal(make_reader(root), ref)[0] is Reason.UNSUPPORTED_REFERENCE


@pytest.mark.parametrize(
    "ref",
    [
        "ftp://h/a.jpg",
        "github://o:r@/a",
        "reference://x",
        "simplecache::s3://b/k.jpg",
        "zip://a.jpg::file:///x.zip",
        "local:///etc/passwd",
        "filecache::/etc/passwd",
        "blockcache::https://h/a.jpg",
        "s3://b/a::b",
        "file://host/a.jpg",
        "file://",
        "smb://h/s/a.jpg",
        "s3://key:se/cret@b/a.jpg",
    ],
)
def test_other_schemes_and_chained_urls_are_refused(root, ref):
    assert refusal(make_reader(root), ref)[0] is Reason.UNSUPPORTED_REFERENCE


def test_a_relative_path_without_a_root_says_what_to_set():
    reason, detail = refusal(make_reader(None), "a/b.jpg")
    assert reason is Reason.UNSUPPORTED_REFERENCE
    assert "image_root" in detail


def test_a_remote_root_is_confined_too_and_says_the_same(monkeypatch):
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0,))
    for name, data in [("a/b.jpg", b"remote bytes"), ("empty.jpg", b""), ("large.jpg", bytes(2000))]:
        fsspec.filesystem("memory").pipe(f"/references-test/base/{name}", data)
    reader = make_reader("memory://references-test/base")
    assert reader.is_remote
    assert reader.read("a/../a/b.jpg") == b"remote bytes"
    assert reader.read("memory://references-test/base/a/b.jpg") == b"remote bytes"
    expected = {
        "c.jpg": Reason.MISSING_IMAGE,
        "empty.jpg": Reason.EMPTY_IMAGE,
        "large.jpg": Reason.IMAGE_TOO_LARGE,
        "../x": Reason.REFERENCE_OUTSIDE_ROOT,
        "a::b": Reason.UNSUPPORTED_REFERENCE,
    }
    assert {ref: refusal(reader, ref)[0] for ref in expected} == expected


def test_rules_are_picklable_and_construction_touches_nothing():
    rules = ReferenceRules(image_root="s3://b/x", archive="/no/such.zip", allow_hosts=("h",), max_bytes=5)
    assert pickle.loads(pickle.dumps(rules)) == rules
    with ReferenceReader(rules) as reader:
        assert reader.is_remote
    assert not make_reader("/no/such/root", archive="/no/such.zip").is_remote


def test_many_threads_read_the_right_files(root):
    for index in range(50):
        (root / f"{index}.jpg").write_bytes(b"%d" % index * 9)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make_reader(root).read, [f"{index % 50}.jpg" for index in range(400)]))
    assert found == [b"%d" % (index % 50) * 9 for index in range(400)]


def test_no_descriptor_stays_open(root):
    reader = make_reader(root)
    gc.collect()  # other tests may have left descriptors to it
    before = os.listdir("/proc/self/fd")
    for ref in ["a/b.jpg", "a", "nowhere", "a/b.jpg/x"] * 3:
        try:
            reader.read(ref)
        except RowError:
            continue
    assert os.listdir("/proc/self/fd") == before


def test_inline_images_keep_only_their_type_and_digest():
    jpeg = "/9j/4AAQSkZJRgABAQAAAQABAAD" + "A" * 5001
    assert stored_ref("data:image/PNG;base64,AAAA", "ab12") == "data:image/png;blake3=ab12"
    assert stored_ref("DATA:,abc", "ab12") == "data:;blake3=ab12"
    assert stored_ref(f"data:{'x' * 99}/y,abc", "ab12") == "data:;blake3=ab12"
    assert stored_ref(jpeg, "ab12") == "base64;blake3=ab12"
    assert safe_ref(jpeg) == f"base64 text ({len(jpeg)} characters)"
    assert safe_ref("data:image/png;base64,AAAA") == "data:image/png (26 characters)"


@given(st.text(max_size=500))
def test_a_safe_reference_is_one_short_printable_line(text):
    assert len(safe_ref(text)) <= 200
    assert safe_ref(text).isprintable()
