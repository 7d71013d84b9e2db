import unittest

from orders import OutOfStock, reserve
from stock import Stock


class TestOrdersIssue(unittest.TestCase):
    def test_nothing_stays_reserved(self):
        stock = Stock({"pen": 5, "pad": 1})
        with self.assertRaises(OutOfStock):
            reserve(stock, {"pen": 3, "pad": 2})
        self.assertEqual(stock.available("pen"), 5)

    def test_the_next_order_succeeds(self):
        stock = Stock({"pen": 3})
        with self.assertRaises(OutOfStock):
            reserve(stock, {"pen": 3, "ink": 1})
        reserve(stock, {"pen": 3})
        self.assertEqual(stock.available("pen"), 0)
