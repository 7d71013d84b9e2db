import unittest

from csvlite import parse_line, read_records


class TestCSVIssue(unittest.TestCase):
    def test_doubled_quotes(self):
        self.assertEqual(parse_line('"say ""hi""",2'), ['say "hi"', "2"])

    def test_only_quotes(self):
        self.assertEqual(parse_line('""""'), ['"'])
        self.assertEqual(read_records('a\n"x""y"'), [{"a": 'x"y'}])
