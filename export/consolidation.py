"""Consolidate classes that were taught to a server: `openworld learn-unknowns RUN --consolidate --publish SHELF`.

A server learns classes in closed form. Their examples are in the quarantine, so an adapter can be learned of them
later, as a run learns one for each of its tasks (`training/learn/adapters/consolidation.py`). On validation photos that
neither has seen, it is compared with what was taught, and the better one is kept. The new version shares every other
file with the version before: detectors, scores, statistics and lessons are the same bytes, and classes can still be
deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from export.checks.remembering import PublishError
from models.trunks.trunk import reopen
from serving.bundle.layout import CARD, GOLDEN
from serving.bundle.model import BundleModel
from serving.bundle.pooled import PooledClassifier
from serving.bundle.pooled_model import Consolidated
from serving.bundle.shelf import Shelf
from serving.teaching.curriculum import Curriculum
from serving.teaching.learning import Knowledge, learn
from serving.teaching.trial import taught_verdicts
from serving.teaching.writing import compose, put_beside
from training.config import RunConfig
from training.data.encoder import Encoder
from training.data.images import Images
from training.data.quarantined import Address, read_items
from training.host.device import choose_device, prepare
from training.learn.adapters.choice import Choice
from training.learn.adapters.consolidation import learn_consolidated
from training.run import RunError
from training.show.console import Reporter
from training.store.checkpoint import load_finished

MIN_IMAGES = 10
"""Examples that a class needs by default."""
WHO = "learn-unknowns"
"""Under this name the change is in the log of the quarantine."""


@dataclass(frozen=True)
class StoredExamples:
    """Examples of taught classes whose images are available: the number in the store and the digest, by label."""

    ids: dict[str, dict[int, str]]

    @classmethod
    def of(cls, curriculum: Curriculum, quarantine: Address, minimum: int, reporter: Reporter) -> StoredExamples:
        """The examples of classes that are not consolidated and have enough examples."""
        done = {label for group in curriculum.adapted for label in group.labels}
        wanted = {
            digest: label
            for digest, label in curriculum.examples().items()
            if label not in curriculum.run_labels and label not in done
        }
        found: dict[str, dict[int, str]] = {label: {} for label in curriculum.labels if label in wanted.values()}
        with quarantine.opened() as store:
            for each in store.with_digests(list(wanted)):
                found[wanted[each.digest]][each.id] = each.digest
        for label, ids in found.items():
            if len(ids) < minimum:
                reporter.print(f"{label!r} stays as it was taught: {len(ids)} images available, needed: {minimum}")
        return cls({label: ids for label, ids in found.items() if len(ids) >= minimum})

    def of_readable(self, images: Images) -> StoredExamples:
        """Without those whose images could not be read."""
        assert images.originals is not None
        read = {original.number for original in images.originals}
        return StoredExamples(
            {label: {n: name for n, name in ids.items() if n in read} for label, ids in self.ids.items()}
        )

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.ids)

    @property
    def digests(self) -> dict[int, str]:
        return {number: name for ids in self.ids.values() for number, name in ids.items()}


def consolidate(
    folder: Path, shelf: Shelf, quarantine: Address, minimum: int, trunk_weights: Path | None, reporter: Reporter
) -> str | None:
    """Consolidate what the current bundle of a shelf was taught; the published version, or None if the taught form is
    kept."""
    config, checkpoint = load_finished(folder)
    model = served(shelf, config, folder)
    curriculum = Curriculum.of(model.bundle)
    examples = StoredExamples.of(curriculum, quarantine, minimum, reporter)
    if len(examples.labels) < 2:
        reporter.print(
            f"nothing to consolidate: {len(examples.labels)} taught classes without an adapter have enough images; "
            "needed: 2, because an adapter learns to distinguish classes"
        )
        return None
    assert config.trunk is not None
    encoder = Encoder(reopen(config.trunk, weights=trunk_weights, run=folder), reporter=reporter)
    chosen = [(label, number) for label, ids in examples.ids.items() for number in ids]
    images = read_items(quarantine, chosen, encoder)
    examples = examples.of_readable(images)
    assert model.pooled is not None
    # The stored classifier is used: computed again with another number of threads, its last bits could differ.
    knowledge = replace(learn(curriculum), classifier=model.pooled.classifier)
    beside = TaughtForm(knowledge, examples, images)
    found = learn_consolidated(
        config,
        checkpoint,
        images,
        examples.labels,
        encoder.views,
        beside.logits,
        knowledge.model.rotations,
        prepare(choose_device()),
        reporter,
    )
    reporter.end()
    print_comparison(examples, found.choice)
    if not found.choice.weight:
        return None
    digests = tuple(tuple(ids.values()) for ids in examples.ids.values())
    group = Consolidated(examples.labels, digests, found.adapter, found.choice.weight)
    after = replace(knowledge, curriculum=replace(curriculum, consolidated=(*curriculum.adapted, group)))
    version = publish(model, after, shelf)
    with quarantine.opened() as store:
        store.settle(after.labels, version, WHO, f"consolidated {', '.join(examples.labels)}")
    return version


def served(shelf: Shelf, config: RunConfig, folder: Path) -> BundleModel:
    """The current bundle of a shelf, if it continues this run."""
    current = shelf.current()
    if current is None:
        raise PublishError(f"{shelf.folder}: nothing was published; allowed: a shelf with a bundle that was taught")
    model = BundleModel.load(current, provider="cpu", precision="fp32")
    trunk = model.manifest.trunk
    if trunk is None or config.trunk is None or trunk.sha256 != config.trunk.sha256:
        raise RunError(
            f"{folder} and {current} have different trunks; allowed: the run that the bundle was exported from"
        )
    return model


@dataclass(frozen=True)
class TaughtForm:
    """What the server learned in closed form, without the photos that judge."""

    knowledge: Knowledge
    examples: StoredExamples
    images: Images

    def logits(self, places: NDArray[np.int64], vectors: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
        """[m, classes] of vectors [m, rotations, dim]; the last columns are the classes to consolidate."""
        labels = list(self.knowledge.labels)
        assert self.images.originals is not None
        digests = [self.examples.digests[original.number] for original in self.images.originals[places]]
        columns = np.array([labels.index(str(label)) for label in self.images.labels[places]])
        taught = taught_vectors(self.knowledge.curriculum)
        unseen = self.knowledge.statistics.copy()
        unseen.remove(np.stack([taught[digest] for digest in digests]), columns)
        classifier = PooledClassifier.fit(unseen, self.knowledge.settings)
        model = replace(self.knowledge.model, classifier=classifier)
        views = vectors[:, : model.rotations] if model.rotations > 1 else vectors[:, 0]
        own = [labels.index(label) for label in self.examples.labels]
        others = [column for column in range(len(labels)) if column not in own]
        return model.outputs(views)["logits"][:, others + own]


def taught_vectors(curriculum: Curriculum) -> Mapping[str, NDArray[np.float32]]:
    """digest -> the vector that was added to the statistics."""
    return {
        digest: row
        for lesson in curriculum.lessons
        for label, rows in lesson.vectors.items()
        for digest, row in zip(lesson.digests[label], rows, strict=True)
    }


def publish(before: BundleModel, after: Knowledge, shelf: Shelf) -> str:
    """Put the consolidated bundle on the shelf and make it the current one, if everything else stays as it is."""
    written = compose(before, after, taught_verdicts(after))
    old, new = before.manifest.files, written.manifest.files
    if changed := [name for name in old if name not in (CARD, GOLDEN) and old[name] != new.get(name)]:
        raise PublishError(f"{', '.join(changed)} would differ from version {before.manifest.version}; allowed: none")
    place = put_beside(written, before.bundle, shelf.folder)
    BundleModel.load(place, provider="cpu", precision="fp32").self_test()
    shelf.point_at(place.name, before.bundle.path.resolve().name)
    return written.manifest.version


def print_comparison(examples: StoredExamples, choice: Choice) -> None:
    """What both forms answer for the validation photos, and which of them is kept."""
    title = f"{choice.images} validation photos of {len(examples.labels)} taught classes"
    table = Table("form", "right among them", "right of all classes", "nats", "kept", title=title, title_justify="left")
    for name, outcome, kept in (
        ("as taught", choice.alone, not choice.weight),
        ("with an adapter", choice.with_adapters, bool(choice.weight)),
    ):
        shares = (f"{100 * share:.1f} %" for share in (outcome.wp, outcome.cil))
        table.add_row(name, *shares, f"{outcome.nats:.3f}", "kept" if kept else "")
    Console(highlight=False).print(table)
