"""Show what the ablation measured: a table, paired differences with intervals, and a plot.

    python benchmarks/ablation/report.py benchmarks/results/ablation.json \
        --plot docs/plots/ablation.svg
    python benchmarks/ablation/report.py first.json second.json --merge ablation.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

LENGTHS = ((0, 8192, "4K"), (8192, 32768, "16K"), (32768, 10**9, "64K"))
PAIRS = (
    ("state512", "w512", "state branch against none, W 512"),
    ("w256", "w512", "W 256 against 512"),
    ("w1024", "w512", "W 1024 against 512"),
)
MEASURES = ("needles", "unseen needles", "passage loss", "continuation loss")
_RESAMPLES = 4000
Run = dict[str, Any]


def load(paths: list[Path]) -> dict[str, Any]:
    """All runs of the files, as one result."""
    results = [json.loads(path.read_text()) for path in paths]
    return {**results[0], "runs": [run for result in results for run in result["runs"]]}


def values(run: Run, measure: str, low: int, high: int) -> dict[int, list[float]]:
    """A measure's samples by document."""
    found: dict[int, list[float]] = {}
    for sample in run["evaluation"]["segments"]:
        kind = sample["kind"]
        if not low <= sample["tokens"] < high:
            continue
        if (measure == "needles" and "needle" in kind) or (
            measure == "unseen needles" and "unseen" in kind
        ):
            value = float(sample["is_exact"])
        elif (measure == "passage loss" and "passage" in kind) or (
            measure == "continuation loss" and kind == "continuation"
        ):
            value = sample["loss"]
        else:
            continue
        found.setdefault(sample["document"], []).append(value)
    return found


def mean(run: Run, measure: str, low: int, high: int) -> float:
    """Mean over all samples."""
    return float(np.mean([v for each in values(run, measure, low, high).values() for v in each]))


def same_seeds(runs: list[Run], first: str, second: str) -> list[tuple[Run, Run]]:
    """Pairs of the two variants; seeds that only one of them has are left out."""
    chosen = [
        {run["seed"]: run for run in runs if run["variant"] == name} for name in (first, second)
    ]
    return [(chosen[0][seed], chosen[1][seed]) for seed in sorted(chosen[0].keys() & chosen[1])]


def difference(
    pairs: list[tuple[Run, Run]], measure: str, low: int, high: int
) -> tuple[float, float, float]:
    """Mean of first minus second on the same samples, and its 95 % interval over documents.

    A document is drawn with all its samples of all pairs. The interval knows the chance in the
    choice of documents, not the chance in training: for that see the differences between seeds.
    """
    by_document: dict[int, list[float]] = {}
    for pair in pairs:
        mine, other = (values(run, measure, low, high) for run in pair)
        for document, samples in mine.items():
            apart = [a - b for a, b in zip(samples, other[document], strict=True)]
            by_document.setdefault(document, []).extend(apart)
    means = np.array([np.mean(each) for each in by_document.values()])
    rng = np.random.default_rng(0)
    draws: npt.NDArray[np.float64] = rng.choice(means, (_RESAMPLES, len(means))).mean(1)
    low_end, high_end = np.percentile(draws, [2.5, 97.5])
    return float(means.mean()), float(low_end), float(high_end)


def comparisons(runs: list[Run]) -> list[tuple[str, list[tuple[Run, Run]]]]:
    """Titles and pairs of runs: variants of equal seed, then seeds of equal variant."""
    found = []
    for first, second, title in PAIRS:
        pairs = same_seeds(runs, first, second)
        found.append((f"{title} (seeds: {len(pairs)})", pairs))
    for name in dict.fromkeys(run["variant"] for run in runs):
        same = sorted((r for r in runs if r["variant"] == name), key=lambda run: run["seed"])
        for other in same[1:]:
            title = f"{name}: seed {same[0]['seed']} against {other['seed']}"
            found.append((title, [(same[0], other)]))
    return [(title, pairs) for title, pairs in found if pairs]


def main() -> None:
    """Print, and where asked merge and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--merge", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    result = load(arguments.results)
    if arguments.merge:
        arguments.merge.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    console = Console(width=120)
    runs = result["runs"]
    table = Table("run", "tokens/s", *(f"{m} {n}" for m in MEASURES[:3] for *_, n in LENGTHS))
    for run in runs:
        training = run.get("training")
        speed = f"{training['tokens'] / training['seconds']:,.0f}" if training else ""
        cells = [f"{mean(run, m, lo, hi):.2f}" for m in MEASURES[:3] for lo, hi, _ in LENGTHS]
        table.add_row(f"{run['variant']}:{run['seed']}", speed, *cells)
    console.print(table)
    for title, pairs in comparisons(runs):
        compared = Table("measure", *(name for *_, name in LENGTHS), title=title)
        for measure in MEASURES:
            cells = []
            for low, high, _ in LENGTHS:
                middle, begin, end = difference(pairs, measure, low, high)
                cells.append(f"{middle:+.3f} [{begin:+.3f}, {end:+.3f}]")
            compared.add_row(measure, *cells)
        console.print(compared)
    if arguments.plot:
        draw(runs, arguments.plot)


def draw(runs: list[Run], path: Path) -> None:
    """Exact needles by length, a line per run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ablation"
    from matplotlib import pyplot

    styles = {"w256": "C1", "w512": "C0", "w1024": "C2", "state512": "C3"}
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axis, measure in zip(axes, ("needles", "passage loss"), strict=True):
        for run in runs:
            if run["variant"] not in styles:
                continue
            line = [mean(run, measure, low, high) for low, high, _ in LENGTHS]
            name = run["variant"].replace("state", "state, W ").replace("w", "W ")
            axis.plot(
                [name for *_, name in LENGTHS], line, marker="o", color=styles[run["variant"]],
                linestyle="-" if run["seed"] == 0 else "--",
                label=f"{name}, seed {run['seed']}",
            )  # fmt: skip
        axis.set_xlabel("document tokens")
        axis.set_title(
            "needles found exactly" if measure == "needles" else "loss of answers on passages"
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
