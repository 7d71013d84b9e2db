import unittest

from events import EventBus


class TestEventsIssue(unittest.TestCase):
    def test_a_leaving_handler_hides_nobody(self):
        bus, seen = EventBus(), []
        bus.once("x", lambda: seen.append("once"))
        bus.subscribe("x", lambda: seen.append("always"))
        bus.publish("x")
        bus.publish("x")
        self.assertEqual(seen, ["once", "always", "always"])

    def test_several_leave(self):
        bus, seen = EventBus(), []
        for number in range(5):
            bus.once("x", lambda number=number: seen.append(number))
        self.assertEqual(bus.publish("x"), 5)
        self.assertEqual(seen, [0, 1, 2, 3, 4])
