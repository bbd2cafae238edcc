"""Draw the plots of docs/performance.md from the results.

python benchmarks/plots.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "performance"
from matplotlib import pyplot  # noqa: E402

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[1] / "docs" / "plots"


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a result file whose members have these values."""
    found = json.loads((RESULTS / name).read_text())["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def model_prefill() -> None:
    """Seconds by length, and tokens per second of ours."""
    figure, (times, speeds) = pyplot.subplots(1, 2, figsize=(9.5, 3.6))
    lines = {
        "ours, linear prefill": rows("model_prefill.json", part="ours"),
        "transformers, SDPA flash": rows("model_prefill.json", part="baseline", kernel="flash"),
        "transformers, SDPA cuDNN": rows("model_prefill.json", part="baseline", kernel="cudnn"),
    }
    for (name, line), color in zip(lines.items(), ("C0", "C3", "C1"), strict=True):
        measured = [row for row in line if "extrapolated" not in row.get("of", "")]
        times.loglog(
            [row["tokens"] for row in measured], [row["seconds"] for row in measured],
            marker="o", color=color, label=name,
        )  # fmt: skip
    times.set(title="whole model, one document", xlabel="tokens", ylabel="seconds")
    for name, file in (("one run", "model_prefill"), ("a later run", "model_prefill_later")):
        ours = rows(f"{file}.json", part="ours")
        speeds.semilogx(
            [row["tokens"] for row in ours], [row["tokens"] / row["seconds"] / 1e6 for row in ours],
            marker="o", label=name,
        )  # fmt: skip
    speeds.set(title="ours", xlabel="tokens", ylabel="million tokens/s", ylim=(0, None))
    for axis in (times, speeds):
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    save(figure, "model_prefill")


def profile() -> None:
    """Milliseconds by kernel of a prefill of 65,536 tokens."""
    names = {
        "nvjet": "matrix products",
        "_phase_attention": "prefill-mode attention",
        "_rms_norm": "norms and residuals",
        "_swiglu": "SwiGLU",
        "_rotary": "key writing",
    }
    spent = dict.fromkeys(names.values(), 0.0)
    for row in rows("model_prefill.json", part="profile"):
        for start, name in names.items():
            if row["kernel"].startswith(start):
                spent[name] += row["ms"]
    figure, axis = pyplot.subplots(figsize=(7, 2.4))
    axis.barh(list(spent), list(spent.values()))
    for place, value in enumerate(spent.values()):
        axis.text(value, place, f" {value:.1f}", va="center")
    axis.invert_yaxis()
    axis.set(title="prefill of 65,536 tokens", xlabel="ms of device time")
    save(figure, "prefill_profile")


def save(figure: Any, name: str) -> None:
    """Write an SVG that is the same bytes for the same numbers."""
    figure.tight_layout()
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    model_prefill()
    profile()
