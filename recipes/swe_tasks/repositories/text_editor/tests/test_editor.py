import unittest

from editor import Editor


class TestEditor(unittest.TestCase):
    def test_undo_and_redo(self):
        editor = Editor("x")
        editor.insert("y")
        editor.delete(0, 1)
        self.assertEqual(editor.text, "y")
        editor.undo()
        self.assertEqual(editor.text, "xy")
        editor.redo()
        self.assertEqual(editor.text, "y")

    def test_nothing_to_undo(self):
        self.assertFalse(Editor().undo())
        self.assertFalse(Editor().redo())

    def test_position_is_checked(self):
        with self.assertRaises(IndexError):
            Editor("ab").insert("c", 3)
