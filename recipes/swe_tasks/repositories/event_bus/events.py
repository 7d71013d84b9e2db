"""Handlers that are called when something happens."""


class EventBus:
    def __init__(self):
        self._handlers = {}

    def subscribe(self, name, handler):
        handlers = self._handlers.setdefault(name, [])
        if handler not in handlers:
            handlers.append(handler)

    def unsubscribe(self, name, handler):
        handlers = self._handlers.get(name, [])
        if handler in handlers:
            handlers.remove(handler)

    def publish(self, name, *details):
        """Call the event's handlers in the order of their registration; returns how many were called."""
        called = 0
        for handler in list(self._handlers.get(name, ())):
            handler(*details)
            called += 1
        return called

    def once(self, name, handler):
        """Call the handler for the next event only."""

        def call_and_leave(*details):
            self.unsubscribe(name, call_and_leave)
            handler(*details)

        self.subscribe(name, call_and_leave)
