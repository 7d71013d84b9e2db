import unittest

from groups import Groups


class TestGroupsIssue(unittest.TestCase):
    def test_joining_twice(self):
        groups = Groups([1, 2, 3])
        self.assertTrue(groups.join(1, 2))
        self.assertFalse(groups.join(2, 1))
        self.assertEqual(groups.count, 2)

    def test_sizes_stay_right(self):
        groups = Groups(range(4))
        for left, right in ((0, 1), (1, 0), (0, 0), (2, 1), (0, 2)):
            groups.join(left, right)
        self.assertEqual((groups.size(0), groups.size(3), groups.count), (3, 1, 2))
