"""What runs on a Ray cluster gives the same as without one. All tests share one local cluster of two processors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from models.trunks.trunk import open_trunk  # noqa: E402
from serving.batch.run import BatchRequest, run_batch  # noqa: E402
from serving.bundle.cluster import Cluster, ClusterError  # noqa: E402
from serving.settings import Settings  # noqa: E402
from tests.helpers_serving import COLOURS, ROOT, image_bytes, write_bundle  # noqa: E402
from training.data.encoder import Encoder  # noqa: E402
from training.data.originals import FileOriginal  # noqa: E402
from training.data.views import turned_view  # noqa: E402
from training.fit import make_parser  # noqa: E402
from training.learn.plan import make_plan  # noqa: E402
from training.run import RunError  # noqa: E402

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("valid") / "bundle")


def test_a_batch_writes_the_same_file(bundle: Path, cluster: None, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number, colour in enumerate([*COLOURS.values()] * 5):
        (images / f"{number:02}.png").write_bytes(image_bytes(colour))
    (images / "07.png").write_bytes(b"not an image")
    files = []
    for name, options in (("alone", {"workers": 1}), ("ray", {"ray": True})):
        files.append(tmp_path / f"{name}.parquet")
        run_batch(BatchRequest(bundle, str(images), files[-1], chunk=4, **options), Settings())  # type: ignore[arg-type]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_rows_of_parquet_files_give_the_same_file(bundle: Path, cluster: None, tmp_path: Path) -> None:
    contents = [image_bytes(colour) for colour in COLOURS.values()] * 5
    source = tmp_path / "source"
    source.mkdir()
    for name, some in (("a", contents[:13]), ("b", [*contents[13:], b"not an image", None])):
        table = pa.table({"image": pa.array(some, pa.binary()), "id": [f"{name}{n}" for n in range(len(some))]})
        pq.write_table(table, source / f"{name}.parquet", row_group_size=5)
    files = []
    for name, options in (("alone", {"workers": 1}), ("ray", {"ray": True})):
        files.append(tmp_path / f"{name}.parquet")
        asked = BatchRequest(bundle, str(source), files[-1], keep=("id",), chunk=4, **options)  # type: ignore[arg-type]
        assert run_batch(asked, Settings()) == 2
    assert files[0].read_bytes() == files[1].read_bytes()
    assert pq.read_table(files[1]).column("id").to_pylist()[12:14] == ["a12", "b0"]


class Reporting:
    """An actor that tells who it is, and dies of some rows."""

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["deadly"]:
            os._exit(1)
        # Long enough for the other actor to get its share.
        time.sleep(0.2)
        return {"process": os.getpid()}


def test_all_actors_work(cluster: None) -> None:
    found = list(Cluster().map(Reporting, (), ({"deadly": False} for _ in range(16)), actors=2))
    assert len(found) == 16
    assert len({row["process"] for row in found}) == 2


def test_a_row_that_kills_every_actor_ends_the_command(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.bundle.cluster.DEATHS", 1)
    with pytest.raises(ClusterError, match="an actor of the Ray cluster failed"):
        list(Cluster().map(Reporting, (), ({"deadly": number == 1} for number in range(3)), actors=1))


def test_encoding_fills_the_cache_with_the_same_vectors(cluster: None, tmp_path: Path) -> None:
    """Photos, a copy of one and a damaged one, each in three rotations."""
    numbers = np.random.default_rng(0)
    for number in range(20):
        pixels = numbers.integers(0, 256, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
    (tmp_path / "20.png").write_bytes((tmp_path / "03.png").read_bytes())
    (tmp_path / "21.png").write_bytes(b"not an image")
    files = [FileOriginal(path) for path in sorted(tmp_path.glob("*.png"))]
    trunk = open_trunk("efficientnet-lite0", size=32)
    alone, spread = (
        Encoder(trunk, provider="cpu", folder=tmp_path / name, ray=name == "ray") for name in ("alone", "ray")
    )
    view = turned_view(4)
    ours, theirs = (encoder.read(files, ["x"] * len(files), view) for encoder in (alone, spread))
    assert len(theirs.images) == 21
    assert np.array_equal(ours.images.pixels, theirs.images.pixels)
    assert ours.digests == theirs.digests
    assert ours.unreadable == theirs.unreadable
    assert len(theirs.unreadable) == 1
    # One vector per content, as without a cluster, and the files need not be read again.
    again = Encoder(trunk, provider="cpu", folder=tmp_path / "ray")
    assert again.missing(files[:21], view) == 0
    assert len(again.read(files[:21], ["x"] * 21, view).images.content) == 20


def test_a_run_without_a_trunk_has_nothing_to_encode(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--ray encodes images with a trunk"):
        make_plan(make_parser().parse(["--ray", "--out", str(tmp_path / "run")]))
