"""`tree-rl view`: the trees of a file in a browser. Imports neither torch nor verl."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tree_rl.commands.row_options import File, GroupBy, RowsOption, Tokenizer, read_rows
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.shown import shown_path
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import write_whole
from tree_rl.viewer.groups import describe_groups
from tree_rl.viewer.page import build_page
from tree_rl.viewer.row_figures import FIGURES, read_figures
from tree_rl.viewer.server import serve_page

Html = Annotated[Path | None, typer.Option(help="Write the page to this file instead of serving it.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")]
Browser = Annotated[bool, typer.Option(help="Open the page in a browser.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Also show partitions of so many unique tokens.")]


def view_file(
    file: File,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    max_tokens: MaxTokens = None,
    html: Html = None,
    port: Port = 0,
    browser: Browser = True,
) -> None:
    """Show the trees of FILE in a browser; FILE may also be a run's folder, whose `trees` are read.

    Without --tokenizer segments show token ids instead of text.
    """
    with one_line_errors():
        source = file / "trees" if (file / "trees").is_dir() else file
        rows = read_rows(source, tokenizer, rows_per, group_by, None)
        decode = None if tokenizer is None else ChatTokenizer(tokenizer).decode
        groups = describe_groups(rows, read_figures(source, rows), decode=decode, max_tokens=max_tokens)
        data = {"title": shown_path(file), "text": decode is not None, "figures": FIGURES, "groups": groups}
        page = build_page(data).encode()
        if html is not None:
            write_whole(html, page)
            say(f"Page written to {shown_path(html)}")
            return
        try:
            with serve_page(page, port) as server:
                address = f"http://127.0.0.1:{server.server_port}/"
                say(f"{address}  (Ctrl+C ends it)")
                if browser:
                    webbrowser.open(address)
                server.serve_forever()
        except OSError as error:
            raise InputError(f"--port {port}: {error.strerror}; choose another") from error
        except KeyboardInterrupt:
            say("")
