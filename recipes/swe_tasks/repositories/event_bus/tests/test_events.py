import unittest

from events import EventBus


class TestEvents(unittest.TestCase):
    def test_order_and_count(self):
        bus, seen = EventBus(), []
        bus.subscribe("x", lambda v: seen.append(("a", v)))
        bus.subscribe("x", lambda v: seen.append(("b", v)))
        self.assertEqual(bus.publish("x", 1), 2)
        self.assertEqual(seen, [("a", 1), ("b", 1)])

    def test_once_alone(self):
        bus, seen = EventBus(), []
        bus.once("x", seen.append)
        bus.publish("x", 1)
        bus.publish("x", 2)
        self.assertEqual(seen, [1])

    def test_nobody_listens(self):
        self.assertEqual(EventBus().publish("nothing"), 0)
