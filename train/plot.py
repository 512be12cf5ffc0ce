"""Records to figures."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = dict[str, Any]

STYLES = {"without BN": ("C3", "--"), "with BN": ("C0", "-")}


def plot_figure1(records: list[Record], caption: str) -> Figure:
    """Returns the paper's Figure 1 in three panels.

    Args:
      records: Each with `network` ("without BN" or "with BN"), `step`, `accuracy` in
        [0, 1] and `percentiles`, the 15th, 50th and 85th of one unit's input.
      caption: What was trained.
    """
    figure = Figure(figsize=(10, 3.6), dpi=200, layout="constrained")
    accuracy, *inputs = figure.subplots(1, 3)
    _plot_accuracy(accuracy, records)
    for axes, letter, network in zip(inputs, "bc", STYLES, strict=True):
        _plot_percentiles(axes, _of(records, network), network)
        axes.set_title(f"({letter}) {network}")
    # One scale: the reader compares how far the two distributions wander.
    lows, highs = zip(*(axes.get_ylim() for axes in inputs), strict=True)
    for axes in inputs:
        room = 0.4 * (max(highs) - min(lows))  # for the legend
        axes.set_ylim(min(lows), max(highs) + room)
    for axes in (accuracy, *inputs):
        axes.set_xlabel("training step")
        axes.xaxis.set_major_formatter(
            lambda step, _: f"{step / 1000:g}k" * bool(step) or "0"
        )
        axes.grid(alpha=0.3)
    figure.supxlabel(caption, fontsize="small")
    return figure


def _plot_accuracy(axes: Axes, records: list[Record]) -> None:
    for network, (colour, line) in STYLES.items():
        rows = _of(records, network)
        axes.plot(
            [row["step"] for row in rows],
            [100 * row["accuracy"] for row in rows],
            color=colour,
            linestyle=line,
            label=network,
        )
    axes.set_title("(a) test accuracy")
    axes.set_ylabel("test accuracy (%)")
    after = [100 * row["accuracy"] for row in records if row["step"]]
    # As the paper's: the first steps, at chance, would take most of the panel.
    axes.set_ylim(min(70, max(after, default=70) - 10), 100)
    axes.legend(loc="lower right")


def _plot_percentiles(axes: Axes, rows: list[Record], network: str) -> None:
    colour = STYLES[network][0]
    steps = [row["step"] for row in rows]
    low, middle, high = zip(*(row["percentiles"] for row in rows), strict=True)
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    for values, line, label in (
        (high, ":", "85th percentile"),
        (middle, "-", "50th percentile"),
        (low, "--", "15th percentile"),
    ):
        axes.plot(steps, values, color=colour, linestyle=line, label=label)
    axes.set_ylabel("input of the sigmoid")
    axes.legend(fontsize="small", loc="upper left")


def _of(records: list[Record], network: str) -> list[Record]:
    return [record for record in records if record["network"] == network]
