import unittest

from editor import Editor


class TestEditorIssue(unittest.TestCase):
    def test_typing_forgets_undone_changes(self):
        editor = Editor()
        editor.insert("a")
        editor.undo()
        editor.insert("b")
        self.assertFalse(editor.redo())
        self.assertEqual(editor.text, "b")

    def test_deleting_forgets_them_too(self):
        editor = Editor("abc")
        editor.insert("d")
        editor.undo()
        editor.delete(0, 1)
        editor.redo()
        self.assertEqual(editor.text, "bc")
