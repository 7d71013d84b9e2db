"""An order of tasks in which each comes behind what it needs."""


class CycleError(ValueError):
    def __init__(self, members):
        super().__init__(f"cycle among {', '.join(members)}")
        self.members = members


def order(needs):
    """Sort tasks.

    `needs` maps a task to the tasks it needs. Among tasks that are ready, the alphabetically first comes first.
    """
    tasks = set(needs) | {need for wanted in needs.values() for need in wanted}
    waiting_for = {task: set(needs.get(task, ())) for task in tasks}
    result = []
    while True:
        ready = sorted(task for task in tasks if task not in result and not waiting_for[task])
        if not ready:
            break
        result.append(ready[0])
        for others in waiting_for.values():
            others.discard(ready[0])
    if len(result) < len(waiting_for):
        raise CycleError(sorted(set(waiting_for) - set(result)))
    return result
