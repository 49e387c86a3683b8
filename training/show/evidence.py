"""Heat maps of the evidence for an answer over the photos of a report; only runs with a trunk have them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from models.trunks.maps import MAP, with_maps
from models.trunks.trunk import INPUT, OUTPUT, TrunkError, TrunkSpec, reopen
from serving.bundle.explanation import cell_vectors, explain, heat_map
from serving.bundle.manifest import Graph
from serving.bundle.sections import ImageSpec
from serving.bundle.session import open_session
from training.data.images import Images, picture
from training.data.reread import reread
from training.learn.pooled_decision import PooledDecider
from training.run import Run

if TYPE_CHECKING:
    import onnxruntime as ort


class ExplainedPhoto(NamedTuple):
    """A photo with its heat map, and whether the parts of the map add up to the evidence of the whole photo."""

    picture: Image.Image
    exact: bool


@dataclass(frozen=True)
class EvidencePictures:
    """The trunk of a run with its feature maps, and what decides."""

    spec: TrunkSpec
    decider: PooledDecider
    graph: bytes

    @classmethod
    def of(cls, run: Run) -> EvidencePictures | None:
        """None for a run without a trunk, or with one that has no feature maps or whose weights are gone."""
        if run.config.trunk is None or not isinstance(run.decider, PooledDecider):
            return None
        try:
            graph = with_maps(reopen(run.config.trunk).model)
        except TrunkError:
            return None
        return None if graph is None else cls(run.config.trunk, run.decider, graph)

    @cached_property
    def _session(self) -> ort.InferenceSession:
        return open_session(Graph(self.graph, {}))

    def over(self, image: Images, class_id: int, side: int, *, unknown: bool) -> ExplainedPhoto | None:
        """The square centre of a single photo with the evidence for a class, or for "unknown", laid over it."""
        spec = ImageSpec(height=self.spec.size, width=self.spec.size, mode="RGB")
        pixels, read = reread(image, spec)
        names = [node.name for node in self._session.get_outputs() if node.name.startswith(MAP)]
        if not len(read):
            return None
        encoded, *maps = self._session.run([OUTPUT, *names], {INPUT: pixels})
        parts = {int(name.removeprefix(MAP)): each[0] for name, each in zip(names, maps, strict=True)}
        cells, shape = cell_vectors(parts, self.spec.depths)
        found = explain(
            encoded[0], cells, shape, self.decider.model.upright().outputs, class_id=class_id, unknown=unknown
        )
        small = picture(pixels[0]).resize((side, side)).convert("RGBA")
        over = Image.open(io.BytesIO(heat_map(found.grid, (side, side))))
        return ExplainedPhoto(Image.alpha_composite(small, over).convert("RGB"), found.exact)
