"""A model for programs: what was taught is known, what was forgotten leaves no trace, and what was frozen stays."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from serving.bundle import directory
from serving.bundle.directory import fresh_directory
from serving.bundle.embedding import PER_CLASS, Embedding
from serving.bundle.layout import EMBEDDING, MANIFEST, detector_name
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel, load_pooled
from serving.bundle.pixels import open_image, to_pixels
from serving.bundle.pooled import PooledClassifier
from serving.bundle.pooled.adapters import Adapter
from serving.errors import RequestError
from serving.inference.answers import describe
from serving.model import Model
from serving.teaching.curriculum import Curriculum, Examples
from serving.teaching.errors import TeachError
from serving.teaching.learning import learn
from serving.teaching.trial import try_out
from serving.teaching.writing import UNFINISHED, Written, put_beside
from tests.helpers import raise_at_call
from tests.helpers_serving import ROOT, reseal
from tests.helpers_teaching import ALL, DIM, RUN_IMAGES, TASKS, encode, picture, pictures, write_bundle

TEST = [content for label in ALL for content in pictures(label, 4, first=500)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("teaching") / "bundle")


def taught(bundle: Path, *lessons: dict[str, Sequence[bytes]]) -> Model:
    model = Model.load(bundle, threads=1)
    for lesson in lessons:
        model.teach(lesson)
    return model


def test_a_model_that_cannot_be_saved_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "saved"
    model = taught(bundle, {"elk": pictures("elk", 3)})
    for call in range(1, 4):
        with monkeypatch.context() as patch:
            raise_at_call(patch, directory, "sync", call)
            with pytest.raises(TeachError, match="saved: the bundle cannot be written: sync died"):
                model.save(place)
        assert list(tmp_path.iterdir()) == []
    place.mkdir()
    assert Model.load(model.save(place), threads=1).labels == model.labels
    assert list(tmp_path.iterdir()) == [place]


def test_what_a_killed_lesson_left_on_a_shelf_is_removed_by_the_next(bundle: Path, tmp_path: Path) -> None:
    """At once, because its lock has ended with it; what a living one writes stays."""
    before = load_bundle(bundle)
    written = Written(before.manifest, {}, {name: name for name in (*before.manifest.files, MANIFEST)})
    with fresh_directory(tmp_path, UNFINISHED) as living:
        (left := living.with_name(f"{living.name}-killed")).mkdir()
        (left / MANIFEST).write_text("half")
        place = put_beside(written, before, tmp_path)
        assert {*tmp_path.iterdir()} == {place, living}
    assert load_bundle(put_beside(written, before, tmp_path)).manifest == before.manifest
    assert [*tmp_path.iterdir()] == [place]


def test_teaches_two_classes(bundle: Path) -> None:
    model = taught(bundle)
    before = [model.predict(content) for content in pictures("elk", 20, first=500)]
    model.teach({"elk": pictures("elk", 25), "fox": pictures("fox", 25)})
    after = [model.predict(content) for content in pictures("elk", 20, first=500)]
    assert sum(answer.known for answer in before) <= 6
    assert sum(answer.label == "elk" for answer in after) >= 17
    old = [model.predict(content).label for content in pictures("dog", 20, first=500)]
    assert old.count("dog") >= 17
    gnus = [model.predict(content).known for content in pictures("gnu", 20, first=500)]
    assert sum(gnus) <= 8


def outputs(model: Model, folder: Path) -> dict[str, np.ndarray]:
    saved = BundleModel.load(model.save(folder), provider="cpu", threads=1)
    saved.self_test()
    return {**saved.run(pixels_of(saved)), "labels": np.array(saved.manifest.labels)}


def pixels_of(model: BundleModel) -> np.ndarray:
    return np.stack([to_pixels(open_image(content), model.manifest.image) for content in TEST])


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one["labels"].tolist() == other["labels"].tolist()
    for name in ("logits", "distances", "scores", "p_task", "probability"):
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-6 * max(1.0, np.abs(other[name]).max()))


ELK, FOX, GNU = ({label: pictures(label, 12)} for label in ("elk", "fox", "gnu"))
MORE_DOG = {"dog": pictures("hen", 9)}


def test_forgetting_is_never_having_learned(bundle: Path, tmp_path: Path) -> None:
    never = taught(bundle, FOX, GNU)
    model = taught(bundle, ELK, FOX, GNU)
    model.forget("elk")
    assert_same(outputs(model, tmp_path / "a"), outputs(never, tmp_path / "b"))
    # Not only equal: the same bundle.
    assert model.version == never.version


def test_teach_forget_teach_again(bundle: Path, tmp_path: Path) -> None:
    once = taught(bundle, ELK)
    again = taught(bundle, ELK)
    again.forget("elk")
    again.teach(ELK)
    assert_same(outputs(once, tmp_path / "a"), outputs(again, tmp_path / "b"))


def test_teach_two_classes_forget_the_first_and_teach_it_again(bundle: Path, tmp_path: Path) -> None:
    """The class comes last then. The classifier does not depend on the order, what is called known does: a lesson's
    detector and its stored scores are of what was known when it was taught."""
    once, again = taught(bundle, ELK, FOX), taught(bundle, ELK, FOX)
    again.forget("elk")
    again.teach(ELK)
    assert again.version == taught(bundle, FOX, ELK).version, "as if it had been taught last"
    one, other = outputs(once, tmp_path / "a"), outputs(again, tmp_path / "b")
    orders = [np.argsort(each["labels"]) for each in (one, other)]
    assert one["labels"].tolist() != other["labels"].tolist()
    for name in ("logits", "probability"):
        wanted, found = (each[name][:, order] for each, order in zip((one, other), orders, strict=True))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * max(1.0, np.abs(wanted).max()))
    p_values = [[model.predict(content).p_value for content in TEST] for model in (once, again)]
    assert p_values[0] != p_values[1], "or the guide is wrong about the order of lessons"


def test_forgetting_a_class_of_the_run(bundle: Path, tmp_path: Path) -> None:
    """The pooled part is that of a run without the class; the detectors of other classes stay as they are."""
    without = write_bundle(tmp_path / "without", tasks=(("ant", "bee", "dog"), TASKS[1]))
    model = taught(bundle)
    model.forget("cat")
    got, wanted = outputs(model, tmp_path / "a"), outputs(taught(without), tmp_path / "b")
    assert got["labels"].tolist() == wanted["labels"].tolist() == ["ant", "bee", "dog", *TASKS[1]]
    old, new = load_bundle(bundle), load_bundle(tmp_path / "a")
    vectors = encode(TEST)
    # The settings were chosen with the class; by the same settings, the classifiers are equal.
    found, never = (learn(Curriculum.of(load_bundle(folder))) for folder in (tmp_path / "a", without))
    one, other = (PooledClassifier.fit(each.statistics, found.settings).logits(vectors) for each in (found, never))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())
    before, after = load_pooled(old).outputs(vectors), load_pooled(new).outputs(vectors)
    kept = np.delete(before["distances"], 2, axis=1)
    np.testing.assert_allclose(after["distances"], kept, rtol=0, atol=1e-6 * np.abs(kept).max())


def test_taught_classes_are_on_the_map(bundle: Path, tmp_path: Path) -> None:
    """Where their examples lie, beside classes that stay where they were, and not after they are forgotten."""
    mapped = shutil.copytree(bundle, tmp_path / "mapped")
    rows = encode([content for label in ALL[:8] for content in pictures(label, 5)])
    stored = io.BytesIO()
    np.savez(stored, **Embedding.fit(rows, np.repeat(np.arange(8), 5)).to_arrays())
    reseal(mapped, EMBEDDING, stored.getvalue())

    def saved(model: Model, name: str) -> Embedding:
        found = load_bundle(model.save(tmp_path / name)).embedding()
        assert found is not None
        return found

    before = load_bundle(mapped).embedding()
    assert before is not None
    model = taught(mapped, ELK, {"fox": pictures("fox", 30)})
    after = saved(model, "taught")
    assert np.bincount(after.class_ids).tolist() == [5] * 8 + [12, PER_CLASS]
    assert np.array_equal(after.places[:40], before.places)
    examples = before.project(encode(list(ELK["elk"])))
    np.testing.assert_allclose(
        np.sort(after.places[after.class_ids == 8], axis=0), np.sort(examples, axis=0), rtol=0, atol=1e-5
    )
    assert after.coordinates is not None
    assert len(after.coordinates) == len(after.places)
    again = Model.load(tmp_path / "taught", threads=1)
    again.forget("elk")
    assert np.bincount(saved(again, "again").class_ids).tolist() == [5] * 8 + [PER_CLASS]


def test_frozen_parts_stay_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    model = taught(bundle, ELK)
    first = model.save(tmp_path / "first")
    model.teach({**FOX, **MORE_DOG})
    second = model.save(tmp_path / "second")
    for name in (detector_name(0), detector_name(1), detector_name(2), "trunk.onnx", "statistics.npz", "lesson0.npz"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    rules = [load_bundle(folder).rule.tasks for folder in (bundle, first, second)]
    assert rules[0] == rules[1][:2]
    assert rules[1] == rules[2][:3]


def test_extends_a_known_class(bundle: Path, tmp_path: Path) -> None:
    """Images of a second kind become examples of a class: they are known then, and what was known stays known."""
    model = taught(bundle)
    hens, dogs = pictures("hen", 20, first=500), pictures("dog", 20, first=500)
    known_before = [model.predict(content).known for content in dogs]
    assert sum(model.predict(content).label == "dog" for content in hens) <= 3
    model.teach({"dog": pictures("hen", 20)})
    assert len(model.labels) == 8
    answers = [model.predict(content) for content in hens]
    assert sum(answer.label == "dog" for answer in answers) >= 15
    known_after = [model.predict(content).known for content in dogs]
    assert all(after for before, after in zip(known_before, known_after, strict=True) if before)
    info = load_bundle(model.save(tmp_path / "more")).manifest.lessons[0]
    assert (info.task, info.extends, info.images) == (None, ("dog",), {"dog": 20})


def test_more_and_more_examples_of_a_class_have_one_detector(bundle: Path, tmp_path: Path) -> None:
    """What a worker holds does not grow with the number of lessons, and every example counts."""
    kinds = ("hen", "gnu", "fox")
    model, versions = taught(bundle), []
    for kind in kinds:
        model.teach({"dog": pictures(kind, 12)})
        versions.append(BundleModel.load(model.save(tmp_path / kind), provider="cpu", threads=1))
    counts = [sum(name.startswith("extension") for name in each.manifest.files) for each in versions]
    assert counts == [1, 1, 1]
    versions[-1].self_test()
    for kind in kinds:
        known = [model.predict(content) for content in pictures(kind, 12, first=500)]
        assert sum(answer.known and answer.label == "dog" for answer in known) >= 8, kind
    # Without the last lesson, the one before is what it was, although the bundle no longer has its extension.
    curriculum = Curriculum.of(versions[-1].bundle)
    assert [each.extension is None for each in curriculum.done] == [True, True, False]
    last = frozenset(name for names in curriculum.lessons[-1].digests.values() for name in names)
    without = learn(curriculum.without_examples(last))
    assert without.curriculum.done == (), "all of it had to be learned again"
    wanted = versions[1].pooled
    assert wanted is not None
    vectors = encode(TEST)
    for name, values in without.model.outputs(vectors).items():
        np.testing.assert_allclose(values, wanted.outputs(vectors)[name], atol=1e-5)


def test_some_classes_of_an_extension_get_more_examples(bundle: Path, tmp_path: Path) -> None:
    both = {"dog": pictures("hen", 10), "cat": pictures("gnu", 10)}
    model = taught(bundle, both, {"dog": pictures("fox", 10)})
    saved = BundleModel.load(model.save(tmp_path / "saved"), provider="cpu", threads=1)
    assert saved.pooled is not None
    assert [extension.used.tolist() for _, extension in saved.pooled.extensions] == [[True, False], [True]]
    for label, kind in (("dog", "hen"), ("cat", "gnu"), ("dog", "fox")):
        known = [model.predict(content) for content in pictures(kind, 12, first=500)]
        assert sum(answer.known and answer.label == label for answer in known) >= 8, kind


def test_before_and_after_are_the_same_measure(bundle: Path) -> None:
    """Examples are left out one by one, of what is served and of what was learned."""
    model = BundleModel.load(bundle, provider="cpu", threads=1)

    def examples(label: str, count: int, first: int) -> Examples:
        vectors = encode(pictures(label, count, first=first))
        return Examples.of({label: [(f"{label}{first + n:04}", row) for n, row in enumerate(vectors)]}, "ada", "now")

    before = learn(Curriculum.of(model.bundle).taught(examples("elk", 12, 0)))
    after = learn(before.learned_curriculum.taught(examples("elk", 10, 100)))
    rules = before.rule(model.bundle.rule), after.rule(model.bundle.rule)
    (found,) = try_out(before, after, rules, np.empty((0, after.curriculum.dim), np.float32)).classes
    counts = []
    for knowledge in (before, after):
        right, column = 0, knowledge.labels.index("elk")
        for lesson in after.curriculum.lessons:
            for name, vector in zip(lesson.digests["elk"], lesson.vectors["elk"], strict=True):
                rest = knowledge.statistics.copy()
                if name in knowledge.curriculum.examples():
                    rest.remove(vector[None], [column])
                answer = PooledClassifier.fit(rest, knowledge.settings).logits(vector[None]).argmax()
                right += int(answer == column)
        counts.append(right)
    assert (found.of, found.added, found.new) == (22, 10, False)
    assert [found.right_before, found.right_after] == counts
    assert counts[0] > 12


def test_every_version_lists_how_far_its_taught_classes_can_be_relied_on(bundle: Path, tmp_path: Path) -> None:
    model = taught(bundle, {"elk": pictures("elk", 25), "fox": pictures("fox", 4)}, {"dog": pictures("hen", 9)})
    saved = BundleModel.load(model.save(tmp_path / "saved"), provider="cpu", threads=1)
    shown = {each.label: each for each in describe(saved).taught}
    assert shown == {each.label: each for each in saved.manifest.taught}
    assert {label: each.grade for label, each in shown.items()} == {"elk": "good", "fox": "few examples", "dog": "good"}
    assert [(each.images, each.examples) for each in shown.values()] == [(25, 25), (4, 4), (33, 9)]
    assert "20 or more" in shown["fox"].advice
    assert shown["elk"].right >= 20
    assert "few examples" in (tmp_path / "saved" / "MODEL_CARD.md").read_text()
    # The same as a job measures beside the stand-ins of the classes of the run.
    knowledge = learn(Curriculum.of(saved.bundle))
    rules = saved.bundle.rule, saved.bundle.rule
    assert try_out(knowledge, knowledge, rules, np.empty((0, DIM), np.float32)).taught == saved.manifest.taught
    model.forget("fox")
    assert "fox" not in {each.label for each in load_bundle(model.save(tmp_path / "less")).manifest.taught}


def test_the_progress_of_a_single_lesson_is_shown(bundle: Path) -> None:
    curriculum = Curriculum.of(BundleModel.load(bundle, provider="cpu", threads=1).bundle)
    given = [(f"{number:04}", row) for number, row in enumerate(encode(pictures("elk", 6)))]
    shares: list[float] = []
    learn(curriculum.taught(Examples.of({"elk": given}, "ada", "now")), shares.append)
    assert shares == sorted(shares)
    assert len(set(shares)) >= 8
    assert (shares[0], shares[-1] < 1) == (0.0, True)


def test_few_examples_do_not_make_everything_known(bundle: Path) -> None:
    model = taught(bundle, {"elk": pictures("elk", 4)})
    strangers = [model.predict(content).known for content in pictures("gnu", 20, first=500)]
    assert sum(strangers) <= 10
    assert sum(model.predict(content).label == "elk" for content in pictures("elk", 20, first=500)) >= 12


def test_lessons_of_one_class_do_not_make_everything_known(bundle: Path) -> None:
    """However classes are taught, one by one or together, about as many strangers are rejected."""
    shown = {label: pictures(label, 8) for label in ("elk", "fox", "gnu", "hen")}
    strangers = pictures("yak", 30, first=500) + pictures("fish", 30, first=500)
    rejected = []
    for lessons in ([shown], [{label: images} for label, images in shown.items()]):
        model = taught(bundle, *lessons)
        rejected.append(sum(not model.predict(content).known for content in strangers))
        known = [model.predict(content).known for label in TASKS[0] for content in pictures(label, 10, first=500)]
        assert sum(known) >= 34
    assert rejected[0] >= 30
    assert rejected[1] >= rejected[0] - 8


OPERATIONS = st.lists(st.sampled_from(["elk", "fox", "gnu", "more dog"]), min_size=1, max_size=4, unique=True)


@given(OPERATIONS, st.data())
@settings(max_examples=12, deadline=None)
def test_any_order_of_lessons_without_one_class(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory, lessons: list[str], data: st.DataObject
) -> None:
    given = {"elk": ELK, "fox": FOX, "gnu": GNU, "more dog": MORE_DOG}
    gone = data.draw(st.sampled_from(lessons))
    if gone == "more dog":
        return
    model = taught(bundle, *(given[name] for name in lessons))
    model.forget(gone)
    never = taught(bundle, *(given[name] for name in lessons if name != gone))
    folder = tmp_path_factory.mktemp("order")
    assert_same(outputs(model, folder / "a"), outputs(never, folder / "b"))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of runs that never had one of the classes."""
    folder = tmp_path_factory.mktemp("without")
    return {
        gone: write_bundle(folder / gone, tuple(tuple(label for label in task if label != gone) for task in TASKS))
        for gone in ("cat", "bat")
    }


@given(OPERATIONS, st.sampled_from(["cat", "bat"]))
@settings(max_examples=8, deadline=None)
def test_any_lessons_without_a_class_of_the_run(
    bundle: Path, without: dict[str, Path], lessons: list[str], gone: str
) -> None:
    """The classifier is that of a run without the class, by the same settings: these were chosen with the class."""
    given = {"elk": ELK, "fox": FOX, "gnu": GNU, "more dog": MORE_DOG}

    def curriculum(folder: Path) -> Curriculum:
        found = Curriculum.of(load_bundle(folder))
        for name in lessons:
            examples = {
                label: [(f"{name}{number:02}", row) for number, row in enumerate(encode(list(some)))]
                for label, some in given[name].items()
            }
            found = found.taught(Examples.of(examples, "ada", ""))
        return found

    vectors = encode(TEST)
    found, never = learn(curriculum(bundle).forgot(gone)), learn(curriculum(without[gone]))
    assert found.labels == never.labels
    one, other = (PooledClassifier.fit(each.statistics, found.settings).logits(vectors) for each in (found, never))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


def test_rename_and_merge(bundle: Path, tmp_path: Path) -> None:
    model = taught(bundle, ELK, FOX)
    model.rename("elk", "moose")
    model.rename("ant", "emmet")
    assert model.labels == ("emmet", *ALL[1:8], "moose", "fox")
    model.merge("fox", "moose")
    assert model.labels == ("emmet", *ALL[1:8], "moose")
    wanted = taught(bundle, ELK, {"elk": FOX["fox"]})
    got, expected = outputs(model, tmp_path / "a"), outputs(wanted, tmp_path / "b")
    np.testing.assert_allclose(got["probability"], expected["probability"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.forget("yak"), "no class 'yak'"),
        (lambda model: model.rename("ant", "bee"), "'bee' is a class already"),
        (lambda model: model.rename("ant", "unknown"), "label is 'unknown'; allowed: 1 to"),
        (
            lambda model: model.teach({"yak": pictures("elk", 1)}),
            "too few examples of 'yak' \\(1\\); allowed: at least 2",
        ),
        (lambda model: model.merge("ant", "bee"), "learned by a run"),
        (lambda model: model.teach({"a\nb": pictures("elk", 2)}), "printable"),
    ],
)
def test_refuses(bundle: Path, change, message: str) -> None:
    model = taught(bundle)
    with pytest.raises(TeachError, match=message):
        change(model)
    assert model.version == load_bundle(bundle).manifest.version


def test_teaching_the_same_examples_again_is_refused(bundle: Path) -> None:
    model = taught(bundle, ELK)
    with pytest.raises(TeachError, match="12 examples, all of them taught before"):
        model.teach(ELK)


def test_with_the_dependencies_of_serving_alone(bundle: Path, tmp_path: Path) -> None:
    for label in ("elk", "gnu"):
        for number, content in enumerate(pictures(label, 8)):
            (tmp_path / f"{label}{number}.png").write_bytes(content)
    program = f"""
import json, sys
from serving.bundle.pooled import PooledClassifier
from serving.model import Model
from serving.teaching.curriculum import Curriculum, Examples
model = Model.load({str(bundle)!r}, threads=1)
model.teach({{"elk": [f"{tmp_path}/elk{{n}}.png" for n in range(8)]}})
label = model.predict("{tmp_path}/elk3.png").label
model.save("{tmp_path}/saved")
model.forget("elk")
print(json.dumps([label, list(model.labels), [n for n in ("torch", "sklearn", "onnx", "scipy") if n in sys.modules]]))
"""
    python = ROOT / ".venv-serving/bin/python"
    if not python.exists():
        pytest.skip("no environment with serving's dependencies alone")
    done = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["elk", list(ALL[:8]), []]
    assert Model.load(tmp_path / "saved", threads=1).labels[-1] == "elk"


@pytest.mark.parametrize(("farther", "objects"), [(0.0, False), (20.0, True)])
def test_the_gate_objects_if_known_images_become_unknown(bundle: Path, farther: float, objects: bool) -> None:
    """The classes are told apart as before, so that only the decision between known and unknown shows the loss."""
    loaded = load_bundle(bundle)
    served = learn(Curriculum.of(loaded))
    tasks = tuple(
        replace(task, detector=replace(task.detector, bias=task.detector.bias + np.float32(farther)))
        for task in served.curriculum.tasks
    )
    after = learn(replace(served.curriculum, tasks=tasks))
    found = try_out(served, after, (loaded.rule, loaded.rule), np.empty((0, DIM), np.float32))
    assert found.worse == ()
    assert found.lost_known.images == 8 * RUN_IMAGES
    assert found.lost_known.known > 0.8 * found.lost_known.images
    assert (found.lost_known.lost > 0, found.lost_known.too_many, found.gate) == (objects, objects, not objects)


def test_examples_that_were_taken_out_need_not_stay_known(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    elks = [(f"elk{number}", row) for number, row in enumerate(encode(pictures("elk", 12)))]
    taught = Curriculum.of(loaded).taught(Examples.of({"elk": elks}, "ada", ""))
    before, after = learn(taught), learn(taught.without_examples(frozenset(name for name, _ in elks[:4])))
    rules = before.rule(loaded.rule), after.rule(loaded.rule)
    nothing = np.empty((0, DIM), np.float32)
    assert try_out(before, after, rules, nothing).lost_known.images == 8 * RUN_IMAGES + 8
    forgotten = learn(taught.forgot("elk"))
    assert try_out(before, forgotten, (*rules[:1], loaded.rule), nothing).lost_known.images == 8 * RUN_IMAGES


def test_expanded_vectors_have_the_outputs_of_the_vectors(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    elks = [(f"elk{number}", row) for number, row in enumerate(encode(pictures("elk", 6)))]
    dogs = [(f"dog{number}", row) for number, row in enumerate(encode(pictures("hen", 6)))]
    model = learn(Curriculum.of(loaded).taught(Examples.of({"elk": elks, "dog": dogs}, "ada", ""))).model
    vectors = encode(TEST)
    expected, found = model.outputs(vectors), model.expanded_outputs(model.classifier.projection.expand(vectors))
    for name in ("logits", "distances"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-3)


def test_a_lesson_is_compared_beside_adapters_that_read_all_rotations(bundle: Path) -> None:
    """Stored vectors are those of upright images, so adapters that read four rotations take no part."""
    loaded = load_bundle(bundle)
    run = Curriculum.of(loaded)
    numbers = np.random.default_rng(0)

    def adapter(classes: int) -> Adapter:
        layers = [(numbers.normal(size=(5, run.dim)), numbers.normal(size=5))]
        inputs = numbers.normal(size=run.dim), numbers.normal(size=run.dim)
        return Adapter.of(inputs, layers, numbers.normal(size=(4, 5, classes)), numbers.normal(size=(4, classes)), 1.0)

    tasks = tuple(replace(task, adapter=adapter(len(task.labels))) for task in run.tasks)
    served = learn(replace(run, tasks=tasks, weight=0.5))
    assert served.model.rotations == 4
    waiting = numbers.normal(size=(3, run.dim)).astype(np.float32)
    waiting /= np.linalg.norm(waiting, axis=1, keepdims=True)
    found = try_out(served, served, (loaded.rule, loaded.rule), waiting)
    assert found.waiting == 3
    assert found.worse == ()


def in_memory(content: bytes, folder: Path) -> dict[str, Any]:
    """The same image in every form that a program may have it in."""
    path = folder / "image.png"
    path.write_bytes(content)
    pixels = np.asarray(Image.open(io.BytesIO(content)))
    return {
        "bytes": content,
        "bytearray": bytearray(content),
        "path": path,
        "text": str(path),
        "open file": path.open("rb"),
        "file in memory": io.BytesIO(content),
        "Pillow, not loaded": Image.open(path),
        "Pillow": Image.fromarray(pixels),
        "array": pixels,
        "array, other strides": pixels[:, ::-1][:, ::-1],
    }


def test_images_are_accepted_as_files_and_as_pixels(bundle: Path, tmp_path: Path) -> None:
    model = taught(bundle)
    content = picture("dog", 501)
    wanted = model.predict(content)
    given = in_memory(content, tmp_path)
    for name, image in given.items():
        assert model.predict(image) == wanted, name
    # A file that was read before is read from its start.
    assert model.predict(given["open file"]) == wanted
    grey = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
    assert model.predict(grey) == model.predict(Image.fromarray(grey))
    as_arrays = [np.asarray(Image.open(io.BytesIO(each))) for each in ELK["elk"]]
    model.teach({"elk": as_arrays[:6]})
    model.teach({"fox": (Image.open(io.BytesIO(each)) for each in FOX["fox"])})
    model.teach({"elk": np.stack(as_arrays[6:])})
    assert model.labels[-2:] == ("elk", "fox")
    assert model.predict(picture("elk", 3)).label == "elk"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (3, "got builtins.int; allowed: a path, the bytes"),
        (None, "got builtins.NoneType; allowed: a path"),
        (np.zeros((4, 4, 3)), r"got an array \[4, 4, 3\] of float64; allowed: .*uint8 array"),
        (np.zeros((4, 4, 4), np.uint8), r"got an array \[4, 4, 4\] of uint8"),
        (np.zeros((0, 4), np.uint8), r"got an array \[0, 4\] of uint8"),
        (io.StringIO("text"), "got a file that returns str"),
        (Image.new("F", (4, 4)), "mode F"),
        ("no\0path", "file cannot be read"),
        ("nothing.jpg", "file cannot be read"),
    ],
)
def test_what_is_no_image_is_refused_by_name(bundle: Path, image: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        taught(bundle).predict(image)


def test_a_damaged_image_of_pillow_is_refused(bundle: Path) -> None:
    broken = Image.open(io.BytesIO(picture("dog", 1)[:-200]))
    with pytest.raises(RequestError, match="image cannot be read"):
        taught(bundle).predict(broken)


def test_an_image_with_two_labels_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Without that, the last label would win when a class is forgotten, and neither class could be."""
    model = taught(bundle)
    same = pictures("elk", 6)
    path = tmp_path / "elk2.png"
    path.write_bytes(same[2])
    with pytest.raises(TeachError, match="image 0 of 'x', which is also image 0 of 'y', has two labels"):
        model.teach({"x": same, "y": same})
    with pytest.raises(TeachError, match=f"'{path}' of 'x', which is also image 1 of 'y'"):
        model.teach({"x": [same[0], path], "y": [same[3], same[2]]})
    assert model.labels == ALL[:8]
    rows = encode(same)
    given = [(f"{number:04}", row) for number, row in enumerate(rows)]
    with pytest.raises(TeachError, match="image 0000 has two labels, 'x' and 'y'"):
        Curriculum.of(load_bundle(bundle)).taught(Examples.of({"x": given, "y": given}, "ada", ""))


def test_images_that_are_taught_under_another_label_move(bundle: Path, tmp_path: Path) -> None:
    """As on a server, where an image has one label: what was learned of it under the other one is taken out."""
    elks, foxes = pictures("elk", 12), pictures("fox", 10)
    model = taught(bundle, {"elk": [*elks, *foxes[:4]]})
    model.teach({"fox": foxes})
    never = taught(bundle, {"elk": elks}, {"fox": foxes})
    assert_same(outputs(model, tmp_path / "a"), outputs(never, tmp_path / "b"))
    # All of a class: the other name takes its place.
    model.teach({"moose": elks})
    assert model.labels[-2:] == ("fox", "moose")
    # One image too few would be left: nothing changes.
    with pytest.raises(TeachError, match="1 example of 'fox' would be left"):
        model.teach({"hen": foxes[1:]})
    assert model.labels[-2:] == ("fox", "moose")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ({"cow": []}, r"'cow': no images; allowed: at least one, as in teach\(\{\"cow\": \[\"cow1.jpg\""),
        ({"cow": "a.jpg"}, r"'cow': 'a.jpg'; allowed: a list of images, as in teach\("),
        ({"cow": Path("a.jpg")}, "a.jpg.*; allowed: a list of images"),
        ({"cow": b"bytes"}, "'cow': one bytes; allowed: a list of images"),
        ({"cow": np.zeros((4, 4, 3), np.uint8)}, "'cow': one ndarray; allowed: a list of images"),
        ({"cow": io.BytesIO(b"")}, "'cow': one BytesIO; allowed: a list of images"),
        ({"cow": 3}, "'cow': a value of type int; allowed: a list"),
        ({}, r"examples are nothing; allowed: images by label, as in teach\("),
        (["a.jpg"], "examples are a value of type list; allowed: images by label"),
        ({3: ["a.jpg"]}, "label is of type int; allowed: a text"),
    ],
)
def test_what_is_no_list_of_images_is_refused_with_an_example(bundle: Path, examples: Any, message: str) -> None:
    with pytest.raises(TeachError, match=message):
        taught(bundle).teach(examples)


def test_a_label_is_that_of_a_class_which_looks_the_same(bundle: Path) -> None:
    """As on a server. What differs in upper and lower case is refused, because only a person knows what is meant."""
    model = taught(bundle)
    with pytest.raises(TeachError, match="'Ant', which differs from the class 'ant' in upper and lower case only"):
        model.teach({"Ant": pictures("elk", 6)})
    with pytest.raises(TeachError, match="'Elk', which differs from the class 'elk'"):
        model.teach({"elk": pictures("elk", 6), "Elk": pictures("elk", 6, first=10)})
    model.teach({" dog ": pictures("hen", 6), "red  elk": pictures("elk", 6), "red elk ": pictures("elk", 3, first=10)})
    assert model.labels == (*ALL[:8], "red elk")
    with pytest.raises(TeachError, match=r"no class 'Red elk'; .*; did you mean 'red elk'"):
        model.forget("Red elk")
    with pytest.raises(TeachError, match="'dog' is a class already"):
        model.rename("red elk", " dog")
    model.rename("red elk", "Elk")
    model.forget(" Elk")
    assert model.labels == ALL[:8]
