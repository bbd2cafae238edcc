"""How often the first cited sentence holds the known evidence: our rules, raw mass, words, chance.

Gold answers are teacher-forced behind document and question, the attention of their tokens to the
document's tokens is cached per question, and every method picks one sentence from it. The masses
come from `transformers` with eager attention. Example, from the repository root:

    python benchmarks/citations.py --data folder/with/parquet --cache /tmp/masses

The data are Parquet files with the columns `doc_id`, `text` and `qas`, where each question has
`question`, `answers` and `evidence`, its character spans in the text.
"""

import argparse
import json
import math
import platform
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from orthros_service.citations import select_evidence, split_sentences
from orthros_service.engine.types import DocumentEvidence

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
RESULT = Path(__file__).parent / "results" / "citations_first_form.json"
MAX_ANSWER_TOKENS = 80
CHARS_PER_TOKEN = 3.6


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question with its answer and the spans of its evidence in the text."""

    set_name: str
    document_id: str
    question_id: str
    text: str
    question: str
    answer: str
    gold: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A question and the attention of its answer's tokens: mass_LN is the mean over the heads."""

    question: Question
    char_starts: np.ndarray
    char_ends: np.ndarray
    mass_LN: np.ndarray


def sample_questions(path: Path, arguments: argparse.Namespace) -> Iterator[list[Question]]:
    """Yield the questions of one document after another; long texts are cut around an evidence."""
    rows = pq.read_table(path).to_pylist()
    rng = random.Random(f"{arguments.seed}{path.stem}")
    rng.shuffle(rows)
    usable = [row for row in rows if any(qa["evidence"] and qa["answers"] for qa in row["qas"])]
    skipped = arguments.skip_documents
    for row in usable[skipped : skipped + arguments.documents]:
        qas = [qa for qa in row["qas"] if qa["evidence"] and qa["answers"]]
        rng.shuffle(qas)
        text = row["text"]
        size = int(arguments.max_tokens * CHARS_PER_TOKEN)
        first, last = qas[0]["evidence"][0][0], qas[0]["evidence"][-1][1]
        low, high = max(0, last - size), min(first, max(0, len(text) - size))
        start = rng.randint(low, max(low, high))
        end = start + size
        inside = [qa for qa in qas if all(start <= s and e <= end for s, e in qa["evidence"])]
        yield [
            Question(
                set_name=path.stem,
                document_id=row["doc_id"],
                question_id=qa["id"],
                text=text[start:end],
                question=qa["question"],
                answer=qa["answers"][0],
                gold=[(s - start, e - start) for s, e in qa["evidence"]],
            )
            for qa in inside[: arguments.questions_per_document]
        ]


def measure_with_transformers(model_directory: Path) -> Callable[[list[Question]], list[Measured]]:
    """Load the model; the result measures all questions of one document over one prefix cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
    header = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    opening = "<|im_end|>\n<|im_start|>assistant\n"

    def encode(text: str) -> Any:
        return tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt"
        )

    def measure(questions: list[Question]) -> list[Measured]:
        document = tokenizer(
            questions[0].text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            split_special_tokens=True,
        )
        offsets = np.array(document["offset_mapping"])
        head = encode(header)["input_ids"]
        prefix = torch.cat((head, torch.tensor([document["input_ids"]])), dim=1)
        cache = DynamicCache()
        model.set_attn_implementation("sdpa")
        model(prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
        # Only the tail's rows of the attention matrix are ever built.
        model.set_attn_implementation("eager")
        measured = []
        for question in questions:
            asked = encode(f"\n\n{question.question}{opening}")["input_ids"]
            answer = encode(question.answer)["input_ids"][:, :MAX_ANSWER_TOKENS]
            tail = torch.cat((asked, answer), dim=1)
            output = model(tail, past_key_values=cache, use_cache=True, output_attentions=True)
            cache.crop(-tail.shape[1])
            rows = slice(asked.shape[1], None)
            columns = slice(head.shape[1], prefix.shape[1])
            mass = [layer[0, :, rows, columns].float().mean((0, 1)) for layer in output.attentions]
            measured.append(
                Measured(
                    question=question,
                    char_starts=offsets[:, 0],
                    char_ends=offsets[:, 1],
                    mass_LN=torch.stack(mass).numpy(),
                )
            )
        return measured

    return torch.inference_mode()(measure)


def load_or_measure(arguments: argparse.Namespace) -> list[Measured]:
    """All questions with their masses, measured once and then read from the cache folder."""
    arguments.cache.mkdir(parents=True, exist_ok=True)
    measure = None
    results = []
    for set_name in arguments.sets:
        for questions in sample_questions(arguments.data / f"{set_name}.parquet", arguments):
            size = f"{arguments.max_tokens}.{arguments.seed}"
            paths = [arguments.cache / f"{q.question_id}.{size}.npz" for q in questions]
            if not all(path.exists() for path in paths):
                measure = measure or measure_with_transformers(arguments.model)
                for path, item in zip(paths, measure(questions), strict=True):
                    spans = np.stack((item.char_starts, item.char_ends))
                    np.savez(path, spans=spans, mass_LN=item.mass_LN)
            for path, question in zip(paths, questions, strict=True):
                with np.load(path) as stored:
                    starts, ends = stored["spans"]
                    mass = stored["mass_LN"]
                results.append(
                    Measured(question=question, char_starts=starts, char_ends=ends, mass_LN=mass)
                )
            print(f"{len(results)} questions", end="\r", flush=True)
    return results


def overlaps_gold(question: Question, start: int, end: int) -> bool:
    return any(start < gold_end and gold_start < end for gold_start, gold_end in question.gold)


def cite(item: Measured, layers: list[int], answer: str | None = None) -> list[tuple[int, int]]:
    evidence = DocumentEvidence(
        char_starts=item.char_starts,
        char_ends=item.char_ends,
        mass=item.mass_LN[layers].mean(axis=0),
    )
    spans = select_evidence([item.question.text], [evidence], answer or item.question.answer)
    return [(span.start_char, span.end_char) for span in spans]


def best_by_raw_mass(item: Measured, layers: list[int]) -> tuple[int, int]:
    sentences = list(split_sentences(item.question.text))
    ends = np.array([end for _, end in sentences])
    index = np.minimum(np.searchsorted(ends, item.char_ends - 1, side="right"), len(ends) - 1)
    mass = np.bincount(index, weights=item.mass_LN[layers].mean(axis=0), minlength=len(ends))
    return sentences[int(mass.argmax())]


def best_by_words(item: Measured) -> tuple[int, int]:
    """The sentence with the most of the answer's words, rare ones first, for its length."""
    text = item.question.text
    sentences = list(split_sentences(text))
    words = [set(re.findall(r"\w+", text[start:end].casefold())) for start, end in sentences]
    wanted = set(re.findall(r"\w+", item.question.answer.casefold()))
    rarity = {w: math.log(1 + len(words) / max(1, sum(w in s for s in words))) for w in wanted}
    scores = [sum(rarity[w] for w in s & wanted) / math.sqrt(len(s) + 3) for s in words]
    return sentences[int(np.argmax(scores))]


def rate(hits: list[bool]) -> dict[str, float | int]:
    """A share with its 95 % Wilson interval."""
    n, z, share = len(hits), 1.96, sum(hits) / len(hits)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return {
        "value": round(share, 3),
        "low": round(centre - half, 3),
        "high": round(centre + half, 3),
        "n": n,
    }


def judge(items: list[Measured], layers: list[int]) -> dict[str, Any]:
    """Every method's precision at 1, and precision and recall of all our spans."""

    def hits(best: Callable[[Measured], tuple[int, int]]) -> list[bool]:
        return [overlaps_gold(item.question, *best(item)) for item in items]

    cited = [(item.question, cite(item, layers)) for item in items]
    # An answer without words leaves only the attention.
    by_mass = [(item.question, cite(item, layers, "-")) for item in items]
    num_layers = items[0].mass_LN.shape[0]
    chance = [
        np.mean([overlaps_gold(item.question, *s) for s in split_sentences(item.question.text)])
        for item in items
    ]
    bands = {f"{n}-{n + 2}": [n, n + 1, n + 2] for n in range(num_layers - 2)}
    return {
        "precision_at_1": {
            "rules": rate([bool(s) and overlaps_gold(q, *s[0]) for q, s in cited]),
            "rules_by_mass_alone": rate([bool(s) and overlaps_gold(q, *s[0]) for q, s in by_mass]),
            "raw_mass_same_layers": rate(hits(lambda item: best_by_raw_mass(item, layers))),
            "raw_mass_all_layers": rate(
                hits(lambda item: best_by_raw_mass(item, list(range(num_layers))))
            ),
            "lexical_overlap": rate(hits(best_by_words)),
            "random_sentence": round(float(np.mean(chance)), 3),
        },
        "all_cited_spans": {
            "precision": rate([overlaps_gold(q, *span) for q, spans in cited for span in spans]),
            "question_has_a_right_span": rate(
                [any(overlaps_gold(q, *span) for span in spans) for q, spans in cited]
            ),
            "spans_per_answer": round(float(np.mean([len(spans) for _, spans in cited])), 2),
        },
        "precision_at_1_of_rules_by_layer": by_layers(
            items, {str(n): [n] for n in range(num_layers)}
        ),
        "precision_at_1_of_rules_by_three_layers": by_layers(items, bands),
    }


def by_layers(items: list[Measured], bands: dict[str, list[int]]) -> dict[str, float]:
    result = {}
    for name, layers in bands.items():
        spans = [(item.question, cite(item, layers)[:1]) for item in items]
        result[name] = rate([bool(s) and overlaps_gold(q, *s[0]) for q, s in spans])["value"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with <set>.parquet")
    parser.add_argument("--cache", type=Path, required=True, help="folder for measured masses")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--sets", nargs="+", default=["covidqa", "fairytaleqa"])
    parser.add_argument("--documents", type=int, default=24, help="documents of each set")
    parser.add_argument(
        "--skip-documents", type=int, default=56, help="those the rules were set on"
    )
    parser.add_argument("--questions-per-document", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=2000, help="about; longer texts are cut")
    parser.add_argument("--layers", type=int, nargs="+", default=[18, 20, 21])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    items = load_or_measure(arguments)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    result: dict[str, Any] = {
        "what": "teacher-forced gold answers; a hit is a sentence that overlaps the gold evidence",
        "options": {k: v for k, v in options.items() if k not in ("data", "cache", "output")},
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "num_documents": len({item.question.document_id for item in items}),
        "all": judge(items, arguments.layers),
    }
    for name in arguments.sets:
        chosen = [item for item in items if item.question.set_name == name]
        result[name] = judge(chosen, arguments.layers)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{json.dumps(result['all']['precision_at_1'], indent=2)}")


if __name__ == "__main__":
    main()
