"""Routes requests to the server that holds their prefix: that of their session, else that of their prompt group.

verl loads it by `rollout.router_config_path`, in one Ray actor for all agent loop workers.
"""

from collections.abc import Mapping
from typing import Any

from cachetools import LRUCache

from tree_rl.verl_plugin.compat import GlobalRequestLoadBalancer

LIMIT_RATIO, LIMIT_REQUESTS = 2, 4
"""A server with its prefix takes a request while it runs fewer than this many times the requests of the least loaded
server, plus `LIMIT_REQUESTS`. Beyond that, waiting in its batch costs more than computing the prefix again."""
GROUP_END = "/"
"""Character between the group and the session in a request id."""


class TreeRouter(GlobalRequestLoadBalancer):
    """verl's load balancer, with groups and a limit.

    A request id is `group/session`, or any other id, which belongs to no group. A session stays on its server and a
    new one goes to the server of its group's newest session, up to the limit. Beyond it, both go to the least loaded.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(servers))
        self._server_of_group: LRUCache = LRUCache(maxsize=self._request_id_to_server.maxsize)

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """The id and the handle of the server for a request; raises `RuntimeError` if there is none."""
        group, found, _ = request_id.rpartition(GROUP_END)
        mine = self._request_id_to_server.pop(request_id, None)
        home = self._server_of_group.get(group) if found else None
        warm = home if mine is None else mine
        if self._may_take(warm):
            self._request_id_to_server[request_id] = warm
        server, handle = super().acquire_server(request_id)
        if found and (mine is None or home not in self._inflight_requests):
            self._server_of_group[group] = server
        return server, handle

    def _may_take(self, server: str | None) -> bool:
        load = self._inflight_requests
        return server in load and load[server] < LIMIT_RATIO * min(load.values()) + LIMIT_REQUESTS

    def clear_sticky_cache(self) -> dict:
        """Forget where sessions and groups are, as verl does when servers come or go."""
        self._server_of_group.clear()
        return super().clear_sticky_cache()
