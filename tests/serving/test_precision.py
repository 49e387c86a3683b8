"""Which of a bundle's precisions runs: the fastest for the provider, unless somebody says."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from serving.layout import BundleError
from serving.preflight import check_in_child
from serving.runtime import CPU, CUDA, FASTEST, Model, ProviderError
from serving.settings import PRECISION_VARIABLE, Settings, SettingsError
from tests.helpers_serving import serving, write_bundle


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("both") / "bundle", precisions=("fp32", "int8"))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRECISION_VARIABLE, raising=False)


def test_a_cpu_takes_int8_where_the_bundle_has_it(both: Path, bundle: Path) -> None:
    assert Model.load(both, provider="cpu").precision == "int8"
    assert Model.load(both, provider="cpu", precision="auto").precision == "int8"
    assert Model.load(bundle, provider="cpu").precision == "fp32"


def test_a_gpu_would_take_fp16_and_no_whole_numbers_before_fp32() -> None:
    assert FASTEST[CUDA].index("fp16") < FASTEST[CUDA].index("fp32") < FASTEST[CUDA].index("int8")
    assert FASTEST[CPU].index("int8") < FASTEST[CPU].index("fp32") < FASTEST[CPU].index("fp16")


def test_the_environment_overrides_and_an_argument_overrides_it(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRECISION_VARIABLE, "fp32")
    assert Model.load(both, provider="cpu").precision == "fp32"
    assert Model.load(both, provider="cpu", precision="int8").precision == "int8"


def test_a_precision_that_the_bundle_has_not_is_refused(both: Path) -> None:
    with pytest.raises(BundleError, match=f"{both}: OPENWORLD_PRECISION is 'fp16'; the bundle has fp32, int8"):
        Model.load(both, provider="cpu", precision="fp16")


def test_a_precision_that_nobody_knows_is_refused(both: Path) -> None:
    with pytest.raises(ProviderError, match="OPENWORLD_PRECISION is 'int4'; allowed: auto, fp32, int8, fp16"):
        Model.load(both, provider="cpu", precision="int4")
    with pytest.raises(SettingsError, match="OPENWORLD_PRECISION is 'int4'; allowed: auto, fp32, int8, fp16"):
        Settings.from_environment({PRECISION_VARIABLE: "int4"})


def test_the_self_test_reads_the_golden_answers_of_its_precision(both: Path) -> None:
    model = Model.load(both, provider="cpu", precision="int8")
    model.self_test()
    for values in model.bundle.golden.outputs["int8"].values():
        values += 1
    with pytest.raises(BundleError, match=r"model\.int8\.onnx: logits of the images in golden\.npz"):
        model.self_test()
    Model.load(both, provider="cpu", precision="fp32").self_test()


def test_a_server_is_stopped_before_it_starts(both: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check_in_child(Settings(provider="cpu", precision="fp16"), both) == 2
    assert "the bundle has fp32, int8" in capfd.readouterr().err


def test_the_server_says_what_it_runs_in(both: Path, tmp_path: Path) -> None:
    with serving(tmp_path, both, settings={PRECISION_VARIABLE: "fp32", "OPENWORLD_ALPHA": "0.2"}) as server:
        said = httpx.get(f"{server.url}/model").json()
    assert (said["alpha"], said["expected_acceptance"]) == (0.2, 0.8)
    assert (said["precision"], said["precisions"]) == ("fp32", ["fp32", "int8"])
    assert said["cascade"] == {"candidates": None, "margin": None, "seen": None, "agreement": None, "images": 0}
