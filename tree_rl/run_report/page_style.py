"""Style of the pages that tree_rl writes, for light and dark mode and all screen sizes."""

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1f2933; --pale: #5f6c7b; --line: #d9dfe5; --panel: #f5f7f9;
  --mark: #cfe3f5; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --ink: #e6eaee; --pale: #9aa7b4; --line: #323a43;
  --panel: #1d232a; --mark: #24476b; } }
* { box-sizing: border-box; }
html { background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 1240px; overflow-wrap: break-word; }
h1 { margin: 0; font-size: 1.5rem; } h2 { margin: 1.6rem 0 .2rem; font-size: 1.05rem; }
p.lead, p.about { color: var(--pale); margin: .2rem 0 .7rem; } p.about { font-size: .86rem; }
table { border-collapse: collapse; } td { padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } td + td { font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); gap: 1.2rem;
  margin: 1.4rem 0; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem;
  min-width: 0; } section h2 { margin-top: 0; }
svg { display: block; width: 100%; height: auto; } section svg text { fill: var(--ink) !important; }
details { margin-top: 1.2rem; } summary { cursor: pointer; }
pre { background: var(--panel); padding: 1rem; overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
code { overflow-wrap: anywhere; } mark { background: var(--mark); color: inherit; }
"""


def page(title: str, body: str) -> str:
    """A self-contained page; `title` and `body` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
