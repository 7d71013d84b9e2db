import unittest

from orders import OutOfStock, cancel, reserve, ship
from stock import Stock


class TestOrders(unittest.TestCase):
    def test_reserve_and_ship(self):
        stock = Stock({"pen": 5})
        reserve(stock, {"pen": 2})
        self.assertEqual(stock.available("pen"), 3)
        ship(stock, {"pen": 2})
        self.assertEqual((stock.counts["pen"], stock.available("pen")), (3, 3))

    def test_cancel(self):
        stock = Stock({"pen": 5})
        reserve(stock, {"pen": 2})
        cancel(stock, {"pen": 2})
        self.assertEqual(stock.available("pen"), 5)

    def test_too_many(self):
        with self.assertRaises(OutOfStock):
            reserve(Stock({"pen": 1}), {"pen": 2})
