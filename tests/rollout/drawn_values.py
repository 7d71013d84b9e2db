"""Texts and JSON values as clients may send them, and the tools that they are sent to."""

from hypothesis import strategies as st

TEXTS = st.one_of(st.sampled_from(["", " a\n", "ü\u0301 名\U0001f40d", '"\n\\']), st.text(max_size=8))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), TEXTS),
    lambda part: st.one_of(st.lists(part, max_size=2), st.dictionaries(TEXTS, part, max_size=2)),
    max_leaves=4,
)
TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": True},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "spawn"}]},
]
