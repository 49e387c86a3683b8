"""The precisions that a graph can be exported and served in. A new precision is one row here and one body in export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """One row of the table."""

    name: str
    cuda_rank: int
    """`auto` takes the lowest rank in the bundle on a GPU."""
    timed_on_cpu: bool
    """`auto` times these against each other on a CPU; the others are used only if the bundle has nothing else."""
    golden_tolerance: float
    """The self-test allows |output - recorded| up to this times 1 + |recorded|. That leaves room for another order of
    summation on a GPU, but not for TF32. In fp16 every sum is rounded to 5e-4 of itself, and a GPU rounds differently
    from the CPU that produced the recorded outputs."""
    trunk_tolerance: float | None
    """The same for the graph of a trunk; None: a trunk cannot have this precision. In int8, the smallest difference
    between two CPUs may round a number to another step, and that grows through some fifty layers."""


PRECISIONS = {
    row.name: row
    for row in (
        Precision("fp32", cuda_rank=1, timed_on_cpu=True, golden_tolerance=1e-3, trunk_tolerance=1e-3),
        Precision("int8", cuda_rank=2, timed_on_cpu=True, golden_tolerance=1e-3, trunk_tolerance=0.5),
        Precision("fp16", cuda_rank=0, timed_on_cpu=False, golden_tolerance=2e-2, trunk_tolerance=None),
    )
}
AUTO = "auto"
TRUNK_PRECISIONS = tuple(row.name for row in PRECISIONS.values() if row.trunk_tolerance is not None)
PRECISION_CHOICES = (AUTO, *PRECISIONS)
