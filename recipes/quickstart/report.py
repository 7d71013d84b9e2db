"""The end of a run: a table on the screen, `report.png`, and a self-contained `report.html`."""

import argparse
from html import escape
from pathlib import Path

from quickstart.figures import draw_report
from quickstart.rows import DumpedRow, read_step
from quickstart.summary import CPU_CAVEAT, Summary, read_summary, step_table, summary_rows
from transformers import AutoTokenizer

from tree_rl.run_report.page_style import page
from tree_rl.tree import Forest, draw_svg

BODY = """<h1>tree_rl quickstart</h1>
<p class="lead">A small Qwen3 model, warm-started by tree SFT, trained by GRPO on trees through verl's own
trainer{seed}.</p>
<table>{table}</table>
<p class="about">{caveat}</p>
{charts}
<p class="about">Blue: trees and what they compute; grey and pale blue: the same rows without trees. In the trees a bar
is a run of tokens, darker the more rows go through it; its number is theirs.</p>
<h2>Real trajectory trees</h2>
<p>All rows of one task at the first and at the last step. Eight sessions share the task; a session branches where its
reasoning is stripped from the next prompt, and where parallel tool calls are followed up in contexts of their own. A
circle marks a branch.</p>
{trees}
<h2>One session of the last step</h2>
<p>Its rows one after the other, without the tokens shared with the row before; <mark>trained tokens</mark> are
marked.</p>
<pre>{session}</pre>
<h2>Next</h2>
<p><code>tree-rl report {folder}</code> draws the whole run,
<code>tree-rl view {folder} --tokenizer {folder}/start/model --model {folder}/start/model/config.json</code> shows its
trees, <code>tree-rl inspect YOUR_ROWS</code> says what trees would save on your data.</p>
"""


def largest_group(rows: list[DumpedRow]) -> list[DumpedRow]:
    """Return the rows of the task that has most of them."""
    groups: dict[str, list[DumpedRow]] = {}
    for row in rows:
        groups.setdefault(row.uid, []).append(row)
    return max(groups.values(), key=len)


def forest_of(rows: list[DumpedRow]) -> Forest:
    """Merge rows."""
    return Forest.from_rows([row.token_ids for row in rows])


def show_session(rows: list[DumpedRow], tokenizer: AutoTokenizer) -> str:
    """Write one session's rows as HTML text, trained tokens marked.

    Args:
        rows: Of one task; the session with the best reward is shown.
        tokenizer: Of the policy.
    """
    best = max(rows, key=lambda row: row.reward).session
    parts, before = [], []
    for number, row in enumerate(row for row in rows if row.session == best):
        ids = row.token_ids
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before))
        )
        trained = [0] * len(row.prompt_ids) + row.response_mask
        parts.append(f"<b>── row {number + 1}, reward {row.reward:.2f}: {shared} of {len(ids)} tokens shared ──</b>\n")
        for index in range(shared, len(ids)):
            text = escape(tokenizer.decode([ids[index]]))
            parts.append(f"<mark>{text}</mark>" if trained[index] else text)
        parts.append("\n\n")
        before = ids
    return "".join(parts).replace("</mark><mark>", "")


def write_html(
    path: Path, summary: Summary, charts: str, first: list[DumpedRow], last: list[DumpedRow], seed: int | None
) -> None:
    """Write the page.

    Args:
        path: Where to.
        summary: The run.
        charts: An svg element.
        first: Rows of one task at the first step.
        last: The same at the last step.
        seed: Of the run, if known.
    """
    table = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in summary_rows(summary)
    )
    trees = "\n".join(
        draw_svg(forest_of(rows), title=title)
        for rows, title in ((first, "Step 1"), (last, f"Step {len(summary.reward)}"))
    )
    folder = path.parent
    session = show_session(last, AutoTokenizer.from_pretrained(folder / "start" / "model"))
    body = BODY.format(
        seed="" if seed is None else f" (seed {seed})",
        table=table,
        caveat=CPU_CAVEAT,
        charts=f'<div class="paper">{charts}</div>',
        trees=trees,
        session=session,
        folder=escape(str(folder)),
    )
    path.write_text(page("tree_rl quickstart", body), encoding="utf-8")


def report(folder: Path, seed: int | None = None) -> Summary:
    """Write `report.png` and `report.html` of a finished run.

    Args:
        folder: The run's output folder.
        seed: Of the run, to be named.

    Returns:
        Its figures.
    """
    summary = read_summary(folder / "grpo.jsonl", folder / "replay.json")
    first, last = (largest_group(read_step(folder / "trees", step)) for step in (1, len(summary.reward)))
    for name in ("report.png", "charts.svg"):
        draw_report(summary, forest_of(first), forest_of(last), folder / name)
    charts = (folder / "charts.svg").read_text(encoding="utf-8")
    (folder / "charts.svg").unlink()
    write_html(folder / "report.html", summary, charts[charts.index("<svg") :], first, last, seed)
    return summary


def print_table(summary: Summary) -> None:
    """Print the figures by step and the summary."""
    print("\n" + "\n".join(step_table(summary)) + "\n")
    for name, value in summary_rows(summary):
        print(f"{name:<34} {value}")
    print(f"\n{CPU_CAVEAT}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print_table(report(parser.parse_args().folder))
