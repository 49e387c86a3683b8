"""Which of a bundle's precisions runs: the fastest on this machine, unless one is requested."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from serving.bundle import model as models
from serving.bundle.errors import BundleError, ProviderError
from serving.bundle.model import BundleModel
from serving.bundle.precisions import PRECISIONS
from serving.host.preflight import check_in_child
from serving.inference.answers import describe
from serving.inference.engine import Engine
from serving.settings import Settings
from tests.helpers_serving import write_bundle


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("both") / "bundle", precisions=("fp32", "int8"))


def take(monkeypatch: pytest.MonkeyPatch, milliseconds: dict[str, float]) -> None:
    """Make a run take this long in each precision."""
    monkeypatch.setattr(
        models, "seconds_per_image", lambda timed: [milliseconds[model.precision] / 1000 for model in timed]
    )


@pytest.mark.parametrize(
    ("fp32", "int8", "chosen"), [(20.0, 9.0, "int8"), (1.0, 1.5, "fp32"), (1.0, 1.0, "fp32"), (1.0, 0.8, "fp32")]
)
def test_a_cpu_runs_int8_only_where_it_is_faster(
    both: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fp32: float,
    int8: float,
    chosen: str,
) -> None:
    take(monkeypatch, {"fp32": fp32, "int8": int8})
    with caplog.at_level(logging.INFO):
        assert BundleModel.load(both, provider="cpu").precision == chosen
    expected = f"an image takes {fp32:.2f} ms in fp32, {int8:.2f} ms in int8 on this CPU: {chosen} is used"
    assert [record.message for record in caplog.records if "an image takes" in record.message] == [expected]


def test_the_faster_of_two_real_graphs_is_found(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models on one graph, of which one runs it a hundred times, and then the bundle's own graphs."""
    fast = BundleModel.load(both, provider="cpu", precision="fp32")

    class Slow(BundleModel):
        def run(self, pixels, *, features=False):  # type: ignore[no-untyped-def]
            for _ in range(99):
                super().run(pixels, features=features)
            return super().run(pixels, features=features)

    slow = Slow(fast.bundle, "int8", BundleModel.load(both, provider="cpu", precision="int8").session)
    quick, late = models.seconds_per_image([fast, slow])
    assert 0 < quick < late
    measure, measured = models.seconds_per_image, {}

    def note(timed: Sequence[BundleModel]) -> list[float]:
        seconds = measure(timed)
        measured.update({model.precision: taken for model, taken in zip(timed, seconds, strict=True)})
        return seconds

    monkeypatch.setattr(models, "seconds_per_image", note)
    precision = BundleModel.load(both, provider="cpu").precision
    assert set(measured) == {"fp32", "int8"}
    assert precision == ("int8" if measured["int8"] <= models.WORTH_ROUNDING * measured["fp32"] else "fp32")


def test_nothing_is_timed_where_there_is_no_choice(
    both: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, {})
    assert BundleModel.load(bundle, provider="cpu").precision == "fp32"
    assert BundleModel.load(both, provider="cpu", precision="int8").precision == "int8"
    half = write_bundle(tmp_path / "half", precisions=("fp32", "fp16"))
    assert BundleModel.load(half, provider="cpu").precision == "fp32"
    alone = write_bundle(tmp_path / "alone", precisions=("fp16",))
    assert BundleModel.load(alone, provider="cpu").precision == "fp16"


def test_a_gpu_would_run_fp16_and_int8_last() -> None:
    assert sorted(PRECISIONS, key=lambda name: PRECISIONS[name].cuda_rank) == ["fp16", "fp32", "int8"]


def test_a_precision_that_the_bundle_does_not_contain_is_refused(both: Path) -> None:
    expected = f"{both}: precision is 'fp16'; allowed with this bundle: auto, fp32, int8"
    with pytest.raises(BundleError, match=expected):
        BundleModel.load(both, provider="cpu", precision="fp16")


def test_a_precision_that_does_not_exist_is_refused(both: Path) -> None:
    with pytest.raises(ProviderError, match="precision is 'int4'; allowed: auto, fp32, int8, fp16"):
        BundleModel.load(both, provider="cpu", precision="int4")


def test_the_self_test_compares_with_the_golden_outputs_of_its_precision(both: Path) -> None:
    model = BundleModel.load(both, provider="cpu", precision="int8")
    model.self_test()
    for values in model.bundle.golden.outputs["int8"].values():
        values += 1
    with pytest.raises(BundleError, match=r"model\.int8\.onnx: logits of the images in golden\.npz"):
        model.self_test()
    BundleModel.load(both, provider="cpu", precision="fp32").self_test()


def test_a_server_is_stopped_before_it_starts(
    both: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENWORLD_PRECISION", "fp16")
    assert check_in_child(both) == 2
    assert "allowed with this bundle: auto, fp32, int8" in capfd.readouterr().err


def test_a_worker_reports_its_precision(both: Path) -> None:
    engine = Engine(Settings(bundle=both, precision="fp32", alpha=0.2))
    engine.close()
    model = describe(engine.loaded.model).model_dump(mode="json")
    assert (model["alpha"], model["expected_acceptance"]) == (0.2, 0.8)
    assert (model["precision"], model["precisions"]) == ("fp32", ["fp32", "int8"])
    assert model["cascade"] == {"candidates": None, "margin": None, "seen": None, "agreement": None, "images": 0}
