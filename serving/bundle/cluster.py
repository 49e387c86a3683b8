"""Work on a Ray cluster, by Ray Data. Ray is the extra `ray`; only a command that is asked for it imports it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

WINDOW = 2000
"""Rows that are handed to Ray at a time, to bound the memory of the driver."""
DEATHS = 3
"""An actor that dies is started again, and its row is tried again, so often; then the command stops."""
Row = dict[str, Any]


class ClusterError(Exception):
    """The cluster cannot be used; the message has what is needed."""


class Cluster:
    """The cluster of RAY_ADDRESS, or of this machine; one is started on this machine if there is none."""

    def __init__(self) -> None:
        try:
            import ray
            import ray.data
        except ModuleNotFoundError as error:
            raise ClusterError(
                f"--ray needs the package {error.name}: got none; allowed: pip install -e '.[ray]' in a checkout"
            ) from None
        self._ray: Any = ray
        # The commands show progress themselves.
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        if not ray.is_initialized():
            try:
                ray.init(logging_level=logging.ERROR, log_to_driver=False)
            except Exception as error:
                # Ray has no common base class for this; a node that does not start in time is a plain Exception.
                raise ClusterError(
                    f"no Ray cluster can be used: got {error}; allowed: RAY_ADDRESS of one that runs, or none"
                ) from error
        ray.data.DataContext.get_current().enable_progress_bars = False

    def processors(self, *, gpus: bool = False) -> int:
        """How many processors, or GPUs, all machines of the cluster have together."""
        return int(self._ray.cluster_resources().get("GPU" if gpus else "CPU", 0))

    def shared(self, value: object) -> Any:
        """A reference that each machine resolves once, by `resolved`, for values that are too large to be copied."""
        return self._ray.put(value)

    def map(
        self, actor: type, arguments: tuple[Any, ...], rows: Iterable[Row], *, actors: int, gpus: bool = False
    ) -> Iterator[Row]:
        """What actors make of the rows, in any order; each of them has one processor or GPU.

        `actor` is a class that takes the arguments once, and is then called with one row after another.
        """
        ray, waiting = self._ray, iter(rows)
        try:
            while window := list(islice(waiting, WINDOW)):
                found = ray.data.from_items(window, override_num_blocks=len(window)).map(
                    actor,
                    fn_constructor_args=arguments,
                    compute=ray.data.ActorPoolStrategy(size=min(actors, len(window))),
                    # The default has no limit: a row that kills its actor would be retried endlessly. Ray 2.60 warns
                    # that 2.64 takes these two arguments elsewhere, but has no other place for them yet.
                    max_restarts=DEATHS,
                    max_task_retries=DEATHS,
                    **({"num_gpus": 1} if gpus else {"num_cpus": 1}),
                )
                yield from found.iter_rows()
        except ray.exceptions.RayError as error:
            # The last line is what the actor raised; those before are Ray's own trace.
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
            raise ClusterError(f"an actor of the Ray cluster failed: {reason}; the same command continues") from error


def resolved(reference: Any) -> Any:
    """The value of a reference, in an actor."""
    import ray

    return ray.get(reference)
