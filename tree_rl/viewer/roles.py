"""Role of each token of a row: the model at trained tokens, elsewhere by the control tokens of the chat template.

Legend: L tokens of a row.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from tree_rl.inspection.chat_tokenizer import ChatTokenizer

ROLES = ("given", "system", "user", "tool", "assistant", "model")
"""`model` has a loss, `assistant` is an earlier answer without one, `given` is everything unknown."""
HEADERS = ("<|im_start|>", "<|start_header_id|>", "<|start|>", "<|header_start|>", "<start_of_turn>")
"""Control tokens before a role's name: ChatML, Llama 3, gpt-oss, Llama 4, Gemma."""
MARKS = {"<|system|>": "system", "<|user|>": "user", "<|assistant|>": "assistant", "<|observation|>": "tool"}
"""Control tokens that name the role themselves: GLM."""
SPOKEN = {"ipython": "tool", "model": "assistant", "developer": "system", "observation": "tool", "function": "tool"}
"""Other role names in templates -> role."""
TOOL_RESULT = "<tool_response>"
"""Beginning of a tool result inside a user turn (Qwen)."""
HEADER_TOKENS = 8
"""Number of tokens at the start of a turn that are decoded to find its role."""


class RoleReader:
    """Finds roles with a model's tokenizer; without one it only separates the model's tokens from all others."""

    def __init__(self, folder: Path | None) -> None:
        self.tokenizer = None if folder is None else ChatTokenizer(folder)
        named = {} if self.tokenizer is None else self.tokenizer.vocabulary.get_vocab(with_added_tokens=True)
        self._headers = np.array([named[text] for text in HEADERS if text in named], dtype=np.int64)
        self._marks = {named[text]: ROLES.index(role) for text, role in MARKS.items() if text in named}
        self._known: dict[bytes, int] = {}

    def roles_of(self, token_ids: np.ndarray, trained: np.ndarray | None) -> np.ndarray:
        """int8 [L], index into `ROLES` of each token of a row; the header of a turn has the turn's role."""
        roles = np.zeros(len(token_ids), dtype=np.int8)
        starts = np.flatnonzero(np.isin(token_ids, [*self._headers.tolist(), *self._marks]))
        for start, end in pairwise([*starts.tolist(), len(token_ids)]):
            roles[start:end] = self._role(token_ids[start : min(end, start + HEADER_TOKENS)])
        if trained is not None:
            roles[trained] = ROLES.index("model")
        return roles

    def _role(self, turn: np.ndarray) -> int:
        first = int(turn[0])
        if first in self._marks:
            return self._marks[first]
        key = turn.tobytes()
        if key not in self._known:
            self._known[key] = self._spoken(turn)
        return self._known[key]

    def _spoken(self, turn: np.ndarray) -> int:
        assert self.tokenizer is not None
        words = self.tokenizer.decode(turn[1:].tolist()).lstrip()
        name = words.replace("<", "\n").splitlines()[0].strip() if words else ""
        role = SPOKEN.get(name, name)
        if role == "user" and TOOL_RESULT in words:
            role = "tool"
        return ROLES.index(role) if role in ROLES[:-1] else 0
