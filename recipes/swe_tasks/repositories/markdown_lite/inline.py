import html
import re


def render_inline(text):
    """Bold, emphasis and code within a line."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        pieces[-2:] = ["`".join(pieces[-2:])]
    done = []
    for index, piece in enumerate(pieces):
        escaped = html.escape(piece, quote=False)
        done.append(f"<code>{escaped}</code>" if index % 2 else render_emphasis(escaped))
    return "".join(done)


def render_emphasis(text):
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\*([^*]+)\*", r"<i>\1</i>", text)
