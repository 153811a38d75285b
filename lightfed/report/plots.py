"""The pictures of a run: which there are, what they say, and why one may be left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightfed.drawing.clients import clients_figure
from lightfed.drawing.curves import curves_figure
from lightfed.drawing.heatmap import partition_figure
from lightfed.drawing.style import Theme
from lightfed.results.runfiles import RunFiles
from lightfed.studies.dispfl.similarity import similarity_figure
from lightfed.studies.pfedmoe.gates import gates_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A kind of picture.

    Attributes:
        file: its name in the run folder, where the light one is written.
        heading: over the picture on the page.
        caption: how to read it.
        missing: what the page says in its place where `draw` has nothing to show; None: the page
            does without its heading too.
        draw: the figure of a run, None where the run has not got what it shows.
    """

    file: str
    heading: str
    caption: str
    missing: str | None
    draw: Callable[[RunFiles, Theme], Figure | None]


PICTURES = (
    Picture(
        file="curves.png",
        heading="Course of the run",
        caption="Personal: what a client holds on its own test samples; the band is one standard "
        "deviation over the clients. Bytes are those the algorithm sends, of all clients.",
        missing="No curves: fewer than two rounds were measured.",
        draw=curves_figure,
    ),
    Picture(
        file="clients.png",
        heading="Clients at the last evaluation",
        caption="A point is a client. A box holds the middle half of a cohort of five or more, its "
        "whiskers reach from 5 % to 95 %, the bar is the median. Of more than 500 clients in a "
        "cohort, 500 of evenly spaced rank are drawn.",
        missing="No picture of the clients: no client was evaluated by itself (clients.csv).",
        draw=clients_figure,
    ),
    Picture(
        file="partition.png",
        heading="Partition",
        caption="The shade grows with the square root of the number of samples.",
        missing="No picture of the partition: the run left no samples per class (partition.npz).",
        draw=partition_figure,
    ),
    Picture(
        file="gate.png",
        heading="Weights of the experts",
        caption="Blue: samples of that class go through the client's private expert, personalised; "
        "brown: through the shared one, generalised; grey: half and half; hatched: no test "
        "samples. Bars reach from 0.5 to the mean over a client's classes. Of more than 50 "
        "clients, a row is a group of one cohort and like mean, the most personalised first.",
        missing=None,
        draw=gates_figure,
    ),
    Picture(
        file="similarity.png",
        heading="Labels and masks",
        caption="Pairs of clients that have a mask, in one order on all axes. Colours stand out "
        "where two clients are near: on the left, they hold the classes in like shares; on the "
        "right, few elements are in one of their masks alone. Elements of every mask do not count. "
        "A negative correlation says that clients with like data have like masks.",
        missing=None,
        draw=similarity_figure,
    ),
)
