"""Shortest paths in a weighted directed graph."""

import heapq


class Graph:
    def __init__(self, edges=()):
        self.neighbours = {}
        for source, target, weight in edges:
            self.add_edge(source, target, weight)

    def add_edge(self, source, target, weight=1):
        if weight < 0:
            raise ValueError("weights are not negative")
        self.neighbours.setdefault(source, []).append((target, weight))
        self.neighbours.setdefault(target, [])


def shortest_path(graph, start, goal):
    """Return (length, nodes), or None if the goal cannot be reached."""
    best = {start: 0}
    came_from = {}
    queue = [(0, start)]
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > best[node]:
            continue
        for neighbour, weight in graph.neighbours.get(node, []):
            length = distance + weight
            if length < best.get(neighbour, float("inf")):
                best[neighbour] = length
                came_from[neighbour] = node
                heapq.heappush(queue, (length, neighbour))
    if goal not in best:
        return None
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return best[goal], path[::-1]
