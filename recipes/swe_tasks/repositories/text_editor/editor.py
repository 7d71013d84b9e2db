"""A text with undo and redo."""


class Editor:
    def __init__(self, text=""):
        self.text = text
        self._done = []
        self._undone = []

    def _change(self, text):
        self._done.append(self.text)
        self._undone.clear()
        self.text = text

    def insert(self, piece, position=None):
        position = len(self.text) if position is None else position
        if not 0 <= position <= len(self.text):
            raise IndexError(position)
        self._change(self.text[:position] + piece + self.text[position:])

    def delete(self, start, end):
        self._change(self.text[:start] + self.text[end:])

    def undo(self):
        if not self._done:
            return False
        self._undone.append(self.text)
        self.text = self._done.pop()
        return True

    def redo(self):
        if not self._undone:
            return False
        self._done.append(self.text)
        self.text = self._undone.pop()
        return True
