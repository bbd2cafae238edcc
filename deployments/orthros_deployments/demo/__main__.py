"""Run the commands that a user would type against a service of their own, and show their output.

Any command that fails fails the demo. Nothing is left behind: data lies in a temporary folder.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orthros_client import OrthrosClient, OrthrosError

STORY = Path(__file__).parent / "a_scandal_in_bohemia.txt"
QUESTIONS = (
    "What is the name of the woman whom Sherlock Holmes always calls the woman?",
    "Who visits Holmes in a mask, and what does he want back?",
)
COMMAND = str(Path(sys.executable).parent / "orthros")
WIDTH = 80
EXCERPT_CHARS = 6_000
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 90.0
EXIT_INTERRUPTED = 130
RAY_LINE = re.compile(r"\s*Ray: (\S+)")
METRICS = (
    "orthros_requests_total",
    "orthros_prefill_tokens_total",
    "orthros_generated_tokens_total",
    "orthros_time_to_first_token_seconds_count",
    "orthros_time_to_first_token_seconds_sum",
    "orthros_state_bytes",
    "orthros_citations_total",
)

console = Console(highlight=False)


class StepFailedError(Exception):
    """A command of the demo failed."""


def command_lines(words: Sequence[str]) -> list[str]:
    """A command as a shell takes it, no line longer than it must be."""
    lines = ["$"]
    for word in map(shlex.quote, words):
        # Two columns more for what continues a line.
        if len(lines[-1]) + 1 + len(word) + 2 > WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def show_command(*words: str, ending: str = "") -> None:
    """Print a command before it is run."""
    lines = "\n".join(command_lines(words)) + ending
    console.print(Text(f"\n{lines}", style="bold"), soft_wrap=True)


def tell(text: str) -> None:
    """Print a sentence of the demo itself, in lines that a narrow terminal shows whole."""
    console.print(Text(textwrap.fill(text, WIDTH)), soft_wrap=True)


def orthros(*arguments: str, is_captured: bool = False) -> str:
    """Show and run one `orthros` command; its output goes to the terminal as it comes."""
    show_command("orthros", *arguments)
    done = subprocess.run(
        [COMMAND, *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE if is_captured else None,
    )
    if done.returncode not in (0, 3) or (done.returncode == 3 and arguments[0] != "batch"):
        raise StepFailedError(f"`orthros {arguments[0]}` ended with exit code {done.returncode}")
    return done.stdout or ""


def is_ready(client: OrthrosClient) -> bool:
    """Whether the service answers and can work."""
    try:
        return client.readyz()
    except OrthrosError:
        return False


def show_start(lines: Iterable[str]) -> str:
    """Show what `orthros serve` says when it is ready; the address of its Ray, from its last line.

    Raises:
        StepFailedError: The lines ended before that one.
    """
    for line in lines:
        console.print(Text(line.rstrip()), soft_wrap=True)
        if match := RAY_LINE.match(line):
            return match[1]
    raise StepFailedError("the service ended before it said where it runs")


@contextlib.contextmanager
def service() -> Iterator[tuple[str, str]]:
    """`orthros serve` on a free port for the time of the block; its URL and its Ray's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    show_command("orthros", "serve", "--port", str(port), ending=" &")
    process = subprocess.Popen(
        [COMMAND, "serve", "--port", str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        started = time.monotonic()
        with OrthrosClient(url, max_retries=0) as client:
            while not is_ready(client):
                if process.poll() is not None:
                    raise StepFailedError(f"the service ended with code {process.returncode}")
                if time.monotonic() - started > START_TIMEOUT_S:
                    raise StepFailedError(f"the service was not ready in {START_TIMEOUT_S:.0f} s")
                time.sleep(0.5)
        ray_address = show_start(process.stdout)
        console.print(f"Ready after {time.monotonic() - started:.0f} s.")
        yield url, ray_address
    finally:
        stop(process)


def stop(process: "subprocess.Popen[str]") -> None:
    """Ask the service to end, as Ctrl-C would; kill it if it does not."""
    if process.poll() is None:
        console.print(Text("\n^C  (stopping the service)", style="bold"))
        process.send_signal(signal.SIGINT)
    try:
        code = process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise StepFailedError(f"the service did not stop in {STOP_TIMEOUT_S:.0f} s") from None
    if code not in (0, 130):
        raise StepFailedError(f"the service ended with code {code}")
    console.print("The service has stopped.")


def batch_job(folder: Path, story: str) -> None:
    """A Parquet file with a row for each of some passages, and one that cannot be answered."""
    paragraphs = [p for p in story.split("\n\n") if len(p) > 900][:4]
    table = pa.table(
        {
            "passage": pa.array([*range(1, len(paragraphs) + 1), 99]),
            "text": pa.array([*paragraphs, "   "]),
        }
    )
    source, output = folder / "passages.parquet", folder / "answers"
    pq.write_table(table, source)
    tell(f"A Parquet file with {table.num_rows} rows, the last of them blank on purpose:")
    orthros(
        *("batch", "run", "--input", str(source), "--output", str(output)),
        *("--question", "Who or what is this passage about?", "--max-tokens", "32"),
    )
    parts = [path for path in sorted(output.glob("*.parquet")) if not path.name.startswith("_")]
    rows = pa.concat_tables([pq.read_table(path) for path in parts]).sort_by("passage").to_pylist()
    if [row["passage"] for row in rows] != table["passage"].to_pylist():
        raise StepFailedError("the batch job did not return every row exactly once")
    if [row["status"] for row in rows] != ["ok"] * len(paragraphs) + ["error"]:
        raise StepFailedError("the batch job answered other rows than it should")
    shown = Table(title="Output rows")
    for column in ("passage", "status", "answer or error", "tokens in", "out", "s"):
        shown.add_column(column)
    for row in rows:
        shown.add_row(
            str(row["passage"]),
            row["status"],
            Text(row["answer"] or f"{row['error_code']}: {row['error_message']}"),
            str(row["document_tokens"] or ""),
            str(row["completion_tokens"] or ""),
            f"{row['total_s']:.2f}" if row["total_s"] else "",
        )
    console.print(shown)


def show_metrics(url: str) -> None:
    """Some series of the service's own metrics."""
    console.print(Text(f"\n$ curl -s {url}/metrics | grep orthros_", style="bold"))
    import httpx

    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    lines = [line for line in page.splitlines() if line.startswith(METRICS)]
    if not any(line.startswith("orthros_generated_tokens_total") for line in lines):
        raise StepFailedError("/metrics does not show the generated tokens")
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def run(folder: Path) -> None:
    """Every step, in order."""
    orthros("models", "prepare")
    orthros("models", "list")
    story = STORY.read_text(encoding="utf-8")
    with service() as (url, ray_address):
        # For the commands below: this service, whatever else runs on this machine.
        os.environ.update(  # noqa: TID251
            ORTHROS_CLIENT_URL=url, ORTHROS_DEPLOYMENT__RAY_ADDRESS=ray_address
        )
        console.rule("The beginning of a story: within the trained context")
        excerpt = folder / "excerpt.txt"
        excerpt.write_text(story[: story.rindex("\n", 0, EXCERPT_CHARS)], encoding="utf-8")
        orthros("ask", QUESTIONS[0], "--file", str(excerpt), "--max-tokens", "64")
        console.rule("The whole story: ingested once, linear prefill")
        document = orthros("ingest", str(STORY), is_captured=True).strip()
        # Why they are weak is said below each of them, by the command itself.
        tell("What this part shows is the path and its speed; the answers are weak.")
        for question in QUESTIONS:
            orthros("ask", question, "--document", document, "--max-tokens", "64")
        orthros("summarize", "--document", document, "--max-tokens", "96")
        console.rule("A batch job over Parquet, on the same service")
        batch_job(folder, story)
        console.rule("Metrics")
        show_metrics(url)


def main() -> int:
    """Exit code 0 if every step worked, 130 after Ctrl-C, 1 otherwise."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orthros-demo-") as name:
        folder = Path(name)
        os.environ.update(  # noqa: TID251 - the settings of the commands that it runs
            ORTHROS_DOCUMENTS__DATABASE_URL=f"sqlite:///{folder}/orthros.db",
            ORTHROS_DOCUMENTS__TEXT_URI=str(folder / "texts"),
            ORTHROS_STATE__URI=str(folder / "states"),
            ORTHROS_LOG__LEVEL="WARNING",
        )
        try:
            run(folder)
        except StepFailedError as error:
            console.print(Text(f"\nThe demo failed: {error}.", style="bold red"))
            return 1
        except KeyboardInterrupt:
            console.print(Text("\nThe demo was interrupted.", style="bold red"))
            return EXIT_INTERRUPTED
    console.print(f"\nThe demo is done; every step worked, in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
