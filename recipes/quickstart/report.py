"""The end of a run: a table on the screen, and the page of `tree-rl report` with a real tree and one session's text."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from rich.console import Console
from tokenizers import Tokenizer

from tree_rl.inspection.files.run_log import RunLog, read_run
from tree_rl.inspection.files.writing import write_whole
from tree_rl.run_report.report import build_report
from tree_rl.run_report.terminal import run_table
from tree_rl.tree import Forest, draw_svg
from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, read_trees

CPU_CAVEAT = (
    "On a CPU the update can beat its token bound: rows attend through dense masks, whose cost grows faster than their "
    "tokens. Do not expect this ratio on a GPU (docs/benchmarks)."
)
BODY = """<p class="about">{caveat}</p>
<h2>A real trajectory tree</h2>
<p>All rows of one task at the last step. Eight sessions share the task; a session branches where its reasoning is
stripped from the next prompt, and where parallel tool calls are followed up in contexts of their own. A bar is a run of
tokens, darker the more rows go through it; its number is theirs.</p>
<div style="max-width: 720px">{tree}</div>
<h2>One session of the last step</h2>
<p>Its rows one after the other, without the tokens shared with the row before; <mark>trained tokens</mark> are
marked.</p>
<pre>{session}</pre>
"""


def largest_group(rows: list[FinishedRow]) -> list[FinishedRow]:
    """Return the rows of the task that has most of them."""
    groups: dict[str, list[FinishedRow]] = {}
    for row in rows:
        groups.setdefault(row.uid, []).append(row)
    return max(groups.values(), key=len)


def show_session(rows: list[FinishedRow], tokenizer: Tokenizer) -> str:
    """Write the rows of the session with the best reward, of one task, as HTML text, trained tokens marked."""
    best = max(rows, key=lambda row: row.reward or 0.0).session
    parts, before = list[str](), tuple[int, ...]()
    for number, row in enumerate(row for row in rows if row.session == best):
        ids = row.token_ids
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before))
        )
        trained = [*[0] * len(row.prompt_ids), *row.response_mask]
        said = f"row {number + 1}, reward {row.reward or 0.0:.2f}: {shared} of {len(ids)} tokens shared"
        parts.append(f"<b>── {said} ──</b>\n")
        for index in range(shared, len(ids)):
            text = escape(tokenizer.decode([ids[index]], skip_special_tokens=False))
            parts.append(f"<mark>{text}</mark>" if trained[index] else text)
        parts.append("\n\n")
        before = ids
    return "".join(parts).replace("</mark><mark>", "")


def replay_rows(replayed: Path, run: RunLog) -> list[tuple[str, str]]:
    """What `replay` measured on the first step's batch, and what it means for a step: names and values."""
    result = json.loads(replayed.read_text())
    seconds = result["seconds"]
    trees, rows = (median(seconds[mode]) for mode in ("tree", "flat"))
    first, step = run.metrics[0], run.mean("timing_s/step") or 0.0
    bound = first["tree/flat_tokens"] / first["tree/unique_tokens"]
    by_rows = step + rows - trees
    return [
        (f"update as trees, {result['rows']} rows of step 1", _spread(seconds["tree"])),
        ("update as rows, the same batch", _spread(seconds["flat"])),
        ("speed-up of this update", f"{rows / trees:.1f} times (token bound: {bound:.1f})"),
        ("difference of its log-probs, absolute", f"{result['log_prob_error']:.1e}"),
        ("difference of its gradients, relative", f"{result['gradient_error']:.1e}"),
        (
            "step on trees; with this update alone as rows",
            f"{step:.1f} s, {by_rows:.1f} s ({by_rows / step:.2f} times)",
        ),
    ]


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def report(folder: Path) -> None:
    """Write `report.html` of a finished run into its folder, and print its figures."""
    run = read_run(folder / "grpo.jsonl")
    rows = replay_rows(folder / "replay.json", run)
    group = largest_group(read_trees(folder / "trees", run.steps[-1]))
    forest = Forest.from_rows([row.token_ids for row in group])
    sessions = len({row.session for row in group})
    note = f"{len(group)} rows of {sessions} sessions; POR of the run {run.mean('tree/por'):.3f}"
    tree = draw_svg(forest, width=390, title=f"One task of step {run.steps[-1]}", note=note)
    session = show_session(group, Tokenizer.from_file(str(folder / "start" / "model" / "tokenizer.json")))
    more = BODY.format(caveat=CPU_CAVEAT, tree=tree, session=session)
    write_whole(folder / "report.html", build_report([run], rows=rows, more=more).encode())
    Console().print(run_table(run, rows))
    print(f"\n{CPU_CAVEAT}\n")
