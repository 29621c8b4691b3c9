import pytest

from packer.format.errors import FormatError, InputError
from packer.storage import open_storage
from pipelines.inputs import list_inputs, read_inventory, source_config, write_inventory
from pipelines.recipe import load_recipe


@pytest.fixture
def source_of(tmp_path):
    def make(files, keys=""):
        path = tmp_path / "recipe.yaml"
        path.write_text(
            f"version: 1\nname: demo\noutput: out\nsources:\n  - name: web\n    files: {files}\n    schema: text\n    {keys}\n"
        )
        return load_recipe(path).sources[0]

    return make


def files_of(source, root):
    return [item.file for item in list_inputs(source, str(root), outside="/nowhere")]


def test_files_of_one_base_name_keep_their_folders_and_are_sorted(source_of, kit, tmp_path):
    for name in ("part1/0.jsonl", "part0/0.jsonl", "part0/1.jsonl"):
        kit.jsonl([{"text": name}], name)
    source = source_of(f"['{kit.inputs}/part1/*.jsonl', '{kit.inputs}/*/0.jsonl', '{kit.inputs}/part0/1.jsonl']")
    assert files_of(source, kit.inputs) == ["part0/0.jsonl", "part0/1.jsonl", "part1/0.jsonl"]
    assert files_of(source, tmp_path) == ["inputs/part0/0.jsonl", "inputs/part0/1.jsonl", "inputs/part1/0.jsonl"]


@pytest.mark.parametrize("pattern", ["train-*", "none.jsonl", "rows.+", "sub/**/*.jsonl"])
def test_a_pattern_that_matches_nothing_is_an_error_that_shows_what_was_searched(source_of, kit, pattern):
    kit.jsonl([{"text": "a"}])
    with pytest.raises(InputError) as caught:
        files_of(source_of(f"['{kit.inputs}/{pattern}']"), kit.inputs)
    assert f"{kit.inputs}/{pattern}: found no file, expected at least one" in str(caught.value)


def test_files_of_a_bucket_are_listed_relative_to_it(source_of, s3):
    for name in ("a/0.jsonl", "b/0.jsonl"):
        open_storage(s3).publish_bytes(f"in/{name}", b"{}\n")
    items = list_inputs(source_of(f"{s3}/in/*/*.jsonl"), f"{s3}/in", outside="/nowhere")
    assert [(item.file, item.stat.name, item.stat.size) for item in items] == [
        ("a/0.jsonl", f"{s3}/in/a/0.jsonl", 3),
        ("b/0.jsonl", f"{s3}/in/b/0.jsonl", 3),
    ]


def test_a_file_whose_name_is_not_text_is_refused(source_of, kit):
    with open(bytes(kit.inputs) + b"/\xff.jsonl", "wb") as file:
        file.write(b"{}\n")
    with pytest.raises(InputError, match=r"udcff\.jsonl': found a name that is not UTF-8"):
        files_of(source_of(f"{kit.inputs}/*.jsonl"), kit.inputs)


def test_the_recipe_reaches_the_converter(source_of, kit):
    source = source_of(
        "a.jsonl", "non_finite: 'null'\n    keep: [a]\n    images: {max_per_sample: 3, on_error: drop_image, check: decode}"
    )
    config = source_config(source, str(kit.inputs))
    assert (config.nulls_non_finite, config.keep, config.images.max_per_sample) == (True, ("a",), 3)
    assert (config.images.drops_image, config.images.check, config.references.image_root) == (True, "decode", str(kit.inputs))


def test_an_inventory_is_read_back_and_a_damaged_one_is_refused(kit):
    inventory = {"web": {"a.jsonl": (5, "stamp"), "b.jsonl": (6, "")}}
    assert read_inventory(kit.storage()) == {}
    write_inventory(kit.storage(), inventory)
    assert read_inventory(kit.storage()) == inventory
    (kit.folder / "out/inventory.json").write_bytes(b"{")
    with pytest.raises(FormatError, match=r"inventory\.json"):
        read_inventory(kit.storage())
