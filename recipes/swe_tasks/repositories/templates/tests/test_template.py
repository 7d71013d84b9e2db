import unittest

from template import MissingName, render


class TestTemplate(unittest.TestCase):
    def test_names_and_filters(self):
        self.assertEqual(render("Hi {{ user.name|upper }}!", {"user": {"name": "ann"}}), "Hi ANN!")
        self.assertEqual(render("{{a}}{{b}}", {"a": 1, "b": 2}), "12")

    def test_missing(self):
        with self.assertRaises(MissingName):
            render("{{ nobody }}", {})

    def test_unknown_filter(self):
        with self.assertRaises(ValueError):
            render("{{ a|shout }}", {"a": "x"})
