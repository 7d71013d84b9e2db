import unittest

from groups import Groups


class TestGroups(unittest.TestCase):
    def test_joining(self):
        groups = Groups("abcd")
        groups.join("a", "b")
        groups.join("c", "d")
        self.assertTrue(groups.together("a", "b"))
        self.assertFalse(groups.together("b", "c"))
        self.assertEqual((groups.count, groups.size("d")), (2, 2))

    def test_unknown_element(self):
        with self.assertRaises(KeyError):
            Groups([1]).find(2)
