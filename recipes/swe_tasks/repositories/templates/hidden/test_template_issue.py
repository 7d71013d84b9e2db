import unittest

from template import render


class TestTemplateIssue(unittest.TestCase):
    def test_every_occurrence(self):
        self.assertEqual(render("{{ a }} and {{ a }}", {"a": 1}), "1 and 1")

    def test_with_different_filters(self):
        self.assertEqual(render("{{ a }}{{ a|upper }}{{ a }}", {"a": "x"}), "xXx")
