"""Builders for tiny real inputs and datasets, shared as fixtures because test folders hold no `__init__.py`."""

import dataclasses
import io
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from hypothesis import settings
from PIL import Image

from packer.convert import ConvertTask, Step, convert_range
from packer.format import layout
from packer.format.digest import digest_of_file
from packer.format.manifest import encode_source
from packer.images import CheckLevel, ImageLimits
from packer.loading import ImagePolicy
from packer.references import ReferenceRules
from packer.row_source import SourceConfig
from packer.schemas import DEFAULT_FIELDS, SchemaConfig
from packer.sources import InputRange
from packer.storage import LocalStorage, faults

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
settings.register_profile("bayplan", deadline=None)
settings.load_profile("bayplan")


def pytest_make_parametrize_id(val, argname):
    """Bytes are named after their argument: gzip data carry the time, and all workers of xdist must find the same names."""
    return argname if isinstance(val, bytes) else None


def image_bytes(number=0, size=(8, 6), kind="PNG", **options):
    """A small image whose pixels are its number's: different numbers give different bytes."""
    noise = random.Random(number).randbytes(size[0] * size[1] * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", size, noise).save(out, kind, **options)
    return out.getvalue()


def _convert_all(task, storage):
    return [item for item in convert_range(task, storage) if not isinstance(item, Step)]


def _tree_digest(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest_of_file(str(path)).hexdigest() for path in files}


class Kit:
    """One test's folder: inputs and images below `inputs/`, datasets below `out/`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.inputs = self.folder / "inputs"
        self.inputs.mkdir()

    def storage(self, name="out"):
        return LocalStorage(str(self.folder / name), fsync=False)

    def jsonl(self, rows, name="rows.jsonl"):
        """Write rows (objects, or lines as they stand) one a line; or a whole file given as bytes."""
        path = self.inputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(rows, bytes):
            rows = b"".join((row if isinstance(row, bytes) else orjson.dumps(row)) + b"\n" for row in rows)
        path.write_bytes(rows)
        return path

    def image(self, name="a.png", data=None, **options):
        """Write an image below the image root; its bytes."""
        data = image_bytes(**options) if data is None else data
        path = self.inputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return data

    def source(self, schema="interleaved", *, fields=None, images=None, **changes):
        """A source's config; `images` changes its image policy, `fields` its schema's fields."""
        policy = ImagePolicy(
            limits=ImageLimits(),
            check=CheckLevel.STRUCTURE,
            conversion=None,
            drops_image=False,
            max_per_sample=None,
            keeps_first=False,
        )
        config = SourceConfig(
            name="web",
            schema=SchemaConfig(name=schema, fields=fields or DEFAULT_FIELDS.get(schema, {})),
            references=ReferenceRules(image_root=str(self.inputs), archive=None, allow_hosts=(), max_bytes=1 << 20),
            images=dataclasses.replace(policy, **(images or {})),
            keep=None,
            nulls_non_finite=False,
            max_line_bytes=1 << 20,
            target_bundle_bytes=1 << 30,
            fingerprint="f" * 32,
        )
        return dataclasses.replace(config, **changes)

    def whole(self, path):
        """The whole file as one range."""
        return InputRange(url=str(path), file=os.path.relpath(path, self.inputs), file_size=os.path.getsize(path))

    def task(self, path, source=None, **changes):
        return ConvertTask(source=source or self.source("text"), work=self.whole(path), **changes)

    def convert(self, rows, source=None, *, out="out", name="rows.jsonl"):
        """Convert rows (as `jsonl`) or a file that is there; its parts."""
        path = rows if isinstance(rows, Path) else self.jsonl(rows, name)
        return _convert_all(self.task(path, source), self.storage(out))

    def dataset(self, rows, source=None, **options):
        """Convert, and write `source.json` as the end of a run does; the parts."""
        manifests = self.convert(rows, source, **options)
        self.finish(manifests, out=options.get("out", "out"))
        return manifests

    def finish(self, manifests, *, out="out"):
        name = manifests[0].source
        self.storage(out).publish_bytes(layout.source_file(name), encode_source(name, manifests))

    def file(self, manifest, suffix, *, out="out"):
        return self.folder / out / layout.part_file(manifest.source, manifest.part_id, suffix)

    def records(self, manifests, *, out="out"):
        return [row for part in manifests for row in self._rows(self.file(part, layout.RECORDS_SUFFIX, out=out))]

    def quarantine(self, manifests, *, out="out"):
        return [row for part in manifests for row in self._rows(self.file(part, layout.QUARANTINE_SUFFIX, out=out))]

    @staticmethod
    def _rows(path):
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def stored(self, manifest, entry, *, out="out"):
        """The bytes a record's image entry points at, read by offset and size alone."""
        with open(self.folder / out / layout.source_dir(manifest.source) / entry["bundle"], "rb") as file:
            file.seek(entry["offset"])
            return file.read(entry["size"])


@pytest.fixture
def kit(tmp_path):
    return Kit(tmp_path)


@pytest.fixture
def convert_all():
    """Run a task in this process to its end; the manifests it committed."""
    return _convert_all


@pytest.fixture
def tree_digest():
    """Digests of all files below a folder, by relative name."""
    return _tree_digest


@pytest.fixture
def make_image():
    return image_bytes


@pytest.fixture
def quick_retries(monkeypatch):
    """Pauses between tries that a test can wait for."""
    monkeypatch.setattr(faults, "RETRY_DELAYS_SECONDS", (0.001, 0.001))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """Address of a real S3 server process on this machine."""
    log = tmp_path_factory.mktemp("s3") / "log"
    code = (
        "import sys; from moto.server import ThreadedMotoServer; s = ThreadedMotoServer('127.0.0.1', 0, verbose=False); "
        "s.start(); print(s.get_host_and_port()[1], flush=True); sys.stdin.read()"
    )
    with open(log, "wb") as errors:
        command = [sys.executable, "-W", "ignore", "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    with process:
        port = process.stdout.readline().decode().strip()
        if not port:
            pytest.fail(f"the S3 server did not start: {log.read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}"
        process.stdin.close()
        process.terminate()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """URL of a fresh bucket; the environment is set for this process and its children."""
    import boto3

    settings = {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{time.time_ns()}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    client.close()
    return f"s3://{bucket}"
