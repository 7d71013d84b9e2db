import unittest

from toposort import CycleError, order


class TestToposortIssue(unittest.TestCase):
    def test_two_need_each_other(self):
        with self.assertRaises(CycleError) as caught:
            order({"a": ["b"], "b": ["a"]})
        self.assertEqual(caught.exception.members, ["a", "b"])

    def test_cycle_behind_other_tasks(self):
        with self.assertRaises(CycleError):
            order({"start": [], "x": ["start", "z"], "y": ["x"], "z": ["y"]})
        with self.assertRaises(CycleError):
            order({"self": ["self"]})
