"""`tree-rl view`: the trees of a file or a run in a browser. Imports neither torch nor verl."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tree_rl.commands.row_options import GroupBy, Model, RowsOption, Tokenizer, read_file, refuse_beside, require_page
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import write_whole
from tree_rl.tree.report.counted import counted

FileOrRun = Annotated[Path, typer.Argument(help="A file of rows, or the folder of a run with tree dumps.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write one self-contained file instead of serving it.")]
Port = Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65_535)]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only say where the page is.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Show the partitions of this budget (tree.max_tokens).")]


def view_file(
    context: typer.Context,
    file: FileOrRun,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    html: Html = None,
    port: Port = 0,
    no_browser: NoBrowser = False,
) -> None:
    """Show the trees of FILE to token scale in a browser: roles, rewards, log-probs, text, causes of branching."""
    from tree_rl.viewer.page import view_data, write_page
    from tree_rl.viewer.recorded_rows import read_recorded_rows
    from tree_rl.viewer.roles import RoleReader
    from tree_rl.viewer.server import PageServer

    with one_line_errors():
        if html is not None:
            refuse_beside(context, "--html", "port", "no_browser")
            require_page(html, "--html", file)
        rows = read_recorded_rows(file, lambda path: read_file(path, tokenizer, rows_per, group_by, model).rows)
        source = quoted_path(Path(*file.parts[-2:]))
        page = write_page(view_data(rows, RoleReader(tokenizer), source=source, max_tokens=max_tokens))
        if html is not None:
            write_whole(html, page)
            say(f"Page of {len(page) / 2**20:.1f} MiB written to {quoted_path(html)}")
            return
        with PageServer(page, port) as server:
            say(f"{server.address} shows {counted(len(rows), 'row')}; Ctrl-C ends")
            if not no_browser:
                webbrowser.open(server.address)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                say()
