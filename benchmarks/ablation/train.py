"""Train short conversions that differ in one thing, and compare their answers.

    python benchmarks/ablation/train.py --model DIR --data .stage/ablation \
        --runs w512:0 w256:0 w1024:0 state512:0 --output ablation.json

A run is VARIANT:SEED, with VARIANT w<window> or state<window>; `start` is the untrained model.
Every run sees the same rows in the same order. Results are written after each run.
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import Model, Row, Variant, compile_parts
from rows import CONTINUATION, KINDS, RowSet
from torch import Tensor

from orthros_kernels import DocumentSpan, PhaseLayout
from orthros_kernels.phase_training.layout import TILE
from orthros_service.conversion.schedule import schedule

LEARNING_RATE, WARM_UP, FLOOR = 1.5e-3, 0.05, 0.1
DOCUMENT_WEIGHT, DOCUMENT_SAMPLE, CONTINUATION_WEIGHT = 0.2, 0.125, 0.3


class Rows:
    """A set's rows with everything that training and evaluation need, on the device."""

    def __init__(self, rows: RowSet, device: str) -> None:
        self._rows = rows
        self._device = device
        self.of_row: list[list[int]] = [[] for _ in rows.tokens]
        for index, (row, _, _) in enumerate(rows.documents):
            self.of_row[row].append(index)
        self.segments_of: list[list[int]] = [[] for _ in rows.documents]
        for index, segment in enumerate(rows.segments):
            self.segments_of[segment[0]].append(index)

    def __len__(self) -> int:
        return len(self._rows.tokens)

    def row(self, index: int) -> Row:
        """Tokens, positions and layout of one row."""
        tokens = self._rows.tokens[index].astype(np.int64)
        positions = np.zeros(len(tokens), np.int64)
        is_document = np.zeros(len(tokens), bool)
        of_tile = np.full(len(tokens) // TILE, -1, np.int64)
        spans = []
        for document in self.of_row[index]:
            _, begin, length = (int(n) for n in self._rows.documents[document])
            positions[begin : begin + length] = np.arange(length)
            is_document[begin : begin + length] = True
            of_tile[begin // TILE : -(-(begin + length) // TILE)] = document
            segments = []
            for segment in self.segments_of[document]:
                _, at, count, *_ = (int(n) for n in self._rows.segments[segment])
                positions[at : at + count] = length + np.arange(count)
                segments.append((at, count))
            spans.append(DocumentSpan(start=begin, num_tokens=length, segments=tuple(segments)))
        place = torch.device(self._device)
        layout = PhaseLayout.build(spans, num_tokens=len(tokens)).to(place)
        return Row(
            torch.from_numpy(tokens).to(place),
            layout,
            torch.from_numpy(positions).to(place),
            torch.from_numpy(is_document).to(place),
            torch.from_numpy(of_tile).to(place),
        )

    def answers(self, index: int) -> list[tuple[int, int, int]]:
        """(segment, first predicted token, one past the last) of a row's segments."""
        found = []
        for document in self.of_row[index]:
            for segment in self.segments_of[document]:
                _, at, count, prompt, *_ = (int(n) for n in self._rows.segments[segment])
                found.append((segment, at + prompt, at + count))
        return found

    def kind(self, segment: int) -> int:
        """The kind of a segment."""
        return int(self._rows.segments[segment][4])

    def document_tokens(self, segment: int) -> int:
        """Length of a segment's document."""
        return int(self._rows.documents[self._rows.segments[segment][0]][2])

    def document(self, segment: int) -> int:
        """A segment's document."""
        return int(self._rows.segments[segment][0])

    def distance(self, segment: int) -> int:
        """Tokens from the answer's place to the document's end; -1 if it has none."""
        place = int(self._rows.segments[segment][5])
        return -1 if place < 0 else self.document_tokens(segment) - place


def training_targets(rows: Rows, index: int, row: Row, rng: np.random.Generator) -> Any:
    """Positions whose next token is learned, those tokens, and weights that sum to 1."""
    places, weights = [], []
    for segment, first, end in rows.answers(index):
        places.append(np.arange(first - 1, end - 1))
        is_text = rows.kind(segment) == CONTINUATION
        weight = CONTINUATION_WEIGHT / (end - first) * 13 if is_text else 1.0 / (end - first)
        weights.append(np.full(end - first, weight))
    is_document = row.is_document.cpu().numpy()
    inside = np.flatnonzero(is_document[:-1] & is_document[1:])
    sample = inside[rng.random(len(inside)) < DOCUMENT_SAMPLE]
    answers = sum(float(w.sum()) for w in weights)
    places.append(sample)
    weights.append(np.full(len(sample), DOCUMENT_WEIGHT * answers / max(1, len(sample))))
    place = torch.from_numpy(np.concatenate(places)).to(row.tokens.device)
    weight = torch.from_numpy(np.concatenate(weights)).float().to(row.tokens.device)
    return place, row.tokens[place + 1], weight / weight.sum()


def train(model: Model, rows: Rows, seed: int, limit_s: float) -> dict[str, Any]:
    """One pass over the rows; the time limit only guards against a run that hangs."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=rows_on_gpu(model)
    )
    rng = np.random.default_rng(seed)
    started, losses = time.monotonic(), []
    for step in range(len(rows)):
        row = rows.row(step)
        place, target, weight = training_targets(rows, step, row, rng)
        loss = (model.losses(model(row)[place], target)[0] * weight).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(step, len(rows), warm_up=WARM_UP, floor=FLOOR)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 40 == 5 or step == len(rows) - 1:
            seconds = time.monotonic() - started
            mean = torch.stack(losses[-20:]).mean().item()
            speed = (step + 1) * len(row.tokens) / seconds
            left = (len(rows) - step - 1) * seconds / (step + 1)
            print(f"  step {step}: loss {mean:.3f}, {speed:,.0f} tokens/s, {left:.0f} s left")
        if time.monotonic() - started > limit_s:
            print("  out of time")
            break
    curve = torch.stack(losses).float().tolist()
    return {
        "steps": len(curve),
        "tokens": len(curve) * len(row.tokens),
        "seconds": time.monotonic() - started,
        "loss": [round(value, 4) for value in curve],
    }


def rows_on_gpu(model: Model) -> bool:
    """Whether the model is on a CUDA device."""
    return model.embeddings.is_cuda


@torch.no_grad()
def evaluate(model: Model, rows: Rows) -> dict[str, Any]:
    """Losses and exact matches of every segment, and next-token losses in prefill mode."""
    segments: list[dict[str, Any]] = []
    text: list[dict[str, Any]] = []
    for index in range(len(rows)):
        row = rows.row(index)
        hidden = model(row)
        answers = rows.answers(index)
        place = torch.cat([torch.arange(a - 1, b - 1) for _, a, b in answers])
        place = place.to(row.tokens.device)
        losses, hits = model.losses(hidden[place], row.tokens[place + 1])
        at = 0
        for segment, first, end in answers:
            part = slice(at, at + end - first)
            at = part.stop
            segments.append(
                {
                    "document": rows.document(segment),
                    "tokens": rows.document_tokens(segment),
                    "distance": rows.distance(segment),
                    "kind": KINDS[rows.kind(segment)],
                    "loss": losses[part].mean().item(),
                    "is_exact": bool(hits[part].all()),
                }
            )
        text.append({"row": index, "loss": _document_loss(model, hidden, row)})
    return {"segments": segments, "text": text}


def _document_loss(model: Model, hidden: Tensor, row: Row) -> float:
    inside = (row.is_document[:-1] & row.is_document[1:]).nonzero().squeeze(1)[::8]
    return float(model.losses(hidden[inside], row.tokens[inside + 1])[0].mean())


def build(name: str, model: Path, device: str) -> Model:
    """The model of a run's name."""
    match = re.fullmatch(r"(w|state)(\d+)", name)
    if match is None:
        raise SystemExit(f"unknown variant {name!r}; w<window> or state<window>")
    variant = Variant(window=int(match[2]), has_state=match[1] == "state")
    return Model(model, variant, device)


def main() -> None:
    """Train and evaluate the named runs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=1e9, help="per run")
    parser.add_argument("--rows", type=int, help="train on the first rows only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    if not arguments.no_compile:
        compile_parts()
    trained = RowSet.load(arguments.data / "train.npz")
    if arguments.rows:
        keep = trained.documents[:, 0] < arguments.rows
        last = int(keep.sum())
        trained = RowSet(
            trained.tokens[: arguments.rows],
            trained.documents[:last],
            trained.segments[trained.segments[:, 0] < last],
        )
    train_set = Rows(trained, arguments.device)
    eval_set = Rows(RowSet.load(arguments.data / "eval.npz"), arguments.device)
    result: dict[str, Any] = {"torch": torch.__version__, "runs": []}
    if arguments.device == "cuda":
        result["device"] = torch.cuda.get_device_name(0)
    for run in arguments.runs:
        name, _, seed = run.partition(":")
        torch.manual_seed(int(seed or 0))
        print(f"{run}:")
        is_start = name == "start"
        model = build("w512" if is_start else name, arguments.model, arguments.device)
        entry: dict[str, Any] = {"variant": name, "seed": int(seed or 0)}
        if not is_start:
            entry["training"] = train(model, train_set, int(seed or 0), arguments.limit_s)
        begin = time.monotonic()
        entry["evaluation"] = evaluate(model, eval_set)
        print(f"  evaluated in {time.monotonic() - begin:.0f} s: {brief(entry['evaluation'])}")
        if model.layers[0].state is not None:
            entry["alpha"] = [layer.state.alpha.tolist() for layer in model.layers]
        result["runs"].append(entry)
        arguments.output.write_text(json.dumps(result) + "\n")
        del model
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def brief(evaluation: dict[str, Any]) -> str:
    """Exact needles by length, in a line."""
    parts = []
    for low, high in ((0, 8192), (8192, 32768), (32768, 10**9)):
        mine = [s for s in evaluation["segments"] if low <= s["tokens"] < high]
        exact = [s["is_exact"] for s in mine if "needle" in s["kind"]]
        asked = [s["loss"] for s in mine if "passage" in s["kind"]]
        if exact:
            parts.append(
                f"<{high}: needles {np.mean(exact):.2f}, passage loss {np.mean(asked):.2f}"
            )
    return "; ".join(parts)


if __name__ == "__main__":
    main()
