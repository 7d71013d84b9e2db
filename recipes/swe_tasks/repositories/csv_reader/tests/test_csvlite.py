import unittest

from csvlite import parse_line, read_records


class TestCSV(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(parse_line("a,,c"), ["a", "", "c"])
        self.assertEqual(parse_line("a;b", ";"), ["a", "b"])

    def test_separator_in_quotes(self):
        self.assertEqual(parse_line('"a,b",c'), ["a,b", "c"])

    def test_open_quote(self):
        with self.assertRaises(ValueError):
            parse_line('"a,b')

    def test_records(self):
        self.assertEqual(read_records("x,y\n1,2\n"), [{"x": "1", "y": "2"}])
