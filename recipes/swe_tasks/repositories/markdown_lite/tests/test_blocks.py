import unittest

from blocks import render


class TestBlocks(unittest.TestCase):
    def test_blocks(self):
        self.assertEqual(render("# T\n\na\nb\n\n- x\n- y"), "<h1>T</h1>\n<p>a b</p>\n<ul><li>x</li><li>y</li></ul>")

    def test_code_is_literal(self):
        self.assertEqual(render("use `**a** < b`"), "<p>use <code>**a** &lt; b</code></p>")

    def test_single_marks(self):
        self.assertEqual(render("**bold** *it* 2 < 3"), "<p><b>bold</b> <i>it</i> 2 &lt; 3</p>")
        self.assertEqual(render(""), "")
