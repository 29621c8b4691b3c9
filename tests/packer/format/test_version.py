import pytest

from packer.format.errors import FormatError
from packer.format.version import FORMAT_VERSION, MAGIC, READABLE_VERSIONS, check_version


def test_this_release_reads_what_it_writes():
    assert FORMAT_VERSION in READABLE_VERSIONS
    check_version({"format": MAGIC, "format_version": FORMAT_VERSION}, "here")


@pytest.mark.parametrize("version", [0, 2, 999, "1", None, 1.5])
def test_a_foreign_version_is_refused_with_found_and_readable_versions(version):
    with pytest.raises(FormatError, match=rf"x\.json: found format version {version!r}, this release reads 1"):
        check_version({"format": MAGIC, "format_version": version}, "x.json")


@pytest.mark.parametrize("document", [{}, {"format": "webdataset"}, {"format": None, "format_version": 1}])
def test_a_file_of_another_program_is_refused(document):
    with pytest.raises(FormatError, match=r"x\.json: found format .*, expected 'bayplan'"):
        check_version(document, "x.json")
