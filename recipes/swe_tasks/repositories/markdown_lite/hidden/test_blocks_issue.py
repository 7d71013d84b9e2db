import unittest

from blocks import render
from inline import render_inline


class TestBlocksIssue(unittest.TestCase):
    def test_two_bold_passages(self):
        self.assertEqual(render_inline("**a** and **b**"), "<b>a</b> and <b>b</b>")

    def test_in_a_list(self):
        self.assertEqual(render("- **x** *y* **z**"), "<ul><li><b>x</b> <i>y</i> <b>z</b></li></ul>")
