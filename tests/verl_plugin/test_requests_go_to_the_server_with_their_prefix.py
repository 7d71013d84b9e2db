"""verl's client and our router in front of several embedded servers: who computes which prefix, and how often."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from embedded_server import build_server, describe
from local_trainer import config_of_mode
from omegaconf import OmegaConf
from verl.workers.rollout import router as verls_router
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend
from tree_rl.verl_plugin.agent_loops.tree_router import TreeRouter
from tree_rl.verl_plugin.embedded_rollout.server import HFServer
from tree_rl.verl_plugin.trainer.prepared_config import TREE_ROUTER, prepare_config

PROMPT, ANSWER, OBSERVED = 30, 4, 3
SAMPLING = {"temperature": 1.0, "logprobs": True, "ignore_eos": True}


class Handle:
    """An object of this process behind the interface of a Ray actor's handle."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **named: Any) -> Any:
            result = getattr(self.part, name)(*args, **named)
            if inspect.isawaitable(result):
                return result
            done = asyncio.get_running_loop().create_future()
            done.set_result(result)
            return done

        return SimpleNamespace(remote=remote)


@pytest.fixture(scope="module")
def servers(word_model: str) -> list[HFServer]:
    model = describe(word_model)
    return [build_server(model, rank=rank, prompt_length=60, response_length=20) for rank in range(3)]


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_servers_compute_no_prefix_twice(servers: list[HFServer], client_class: type[LLMServerClient]) -> None:
    async def play() -> list[int]:
        for server in servers:
            await server.clear_kv_cache()
        router = TreeRouter({f"s{rank}": Handle(server) for rank, server in enumerate(servers)})
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "hf", "response_length": 20}}})
        backend = VerlBackend(client_class(config, Handle(router)), end_token_ids=frozenset({1}), server="hf")
        computed = []
        for group in range(3):
            prompt = [10 + group] * PROMPT
            for session in range(4):
                history = list(prompt)
                for _ in range(3):
                    asked = {"max_tokens": ANSWER, "sampling": SAMPLING, "session": f"g{group}/{session}"}
                    answer = await backend.generate(history, **asked)
                    assert answer.cached_tokens is not None
                    computed.append(len(history) - answer.cached_tokens)
                    history += [*answer.token_ids, *[40 + session] * OBSERVED]
        assert router.get_total_inflight() == 0
        return computed

    # The last token of an answer was drawn, but not read.
    turn, again = OBSERVED + 1, 1
    of_group = [PROMPT, turn, turn] + [again, turn, turn] * 3
    assert asyncio.run(play()) == of_group * 3


def placed(router: TreeRouter, *ids: str) -> list[str]:
    return [router.acquire_server(request_id)[0] for request_id in ids]


def test_a_server_far_behind_the_least_loaded_one_gets_no_more() -> None:
    router = TreeRouter(dict.fromkeys("ab"))
    first = placed(router, *[f"g/{session}" for session in range(8)])
    home, other = first[0], "ab".replace(first[0], "")
    # 2 x 0 + 4 requests at the first server; the group goes on at the other one.
    assert first == [home] * 4 + [other] * 4
    assert placed(router, "g/0", "h/0") == [home, other]
    router = TreeRouter(dict.fromkeys("ab"))
    (mine,) = placed(router, "g/0")
    idle = "ab".replace(mine, "")
    assert placed(router, "g/0", "g/0", "g/0") == [mine] * 3
    assert placed(router, "g/0") == [idle], "a session moves"
    for _ in range(4):
        router.release_server(mine)
    assert placed(router, "g/0", "g/1") == [idle, mine], "and stays where its prefix is now; new ones go home"


def test_a_session_whose_server_is_full_goes_to_the_least_loaded_not_to_its_group() -> None:
    router = TreeRouter(dict.fromkeys("abc"))
    (mine,) = placed(router, "g/0")
    placed(router, *["g/0"] * 3)
    (home,) = placed(router, "g/1")
    (idle,) = set("abc") - {mine, home}
    assert home != mine
    assert placed(router, "g/0") == [idle]


def test_new_groups_and_requests_of_no_group_go_to_the_least_loaded() -> None:
    router = TreeRouter(dict.fromkeys("abc"))
    assert sorted(placed(router, "g/0", "h/0", "i/0")) == ["a", "b", "c"]
    assert sorted(placed(router, "j/0", "5f3a", "77b0")) == ["a", "b", "c"]
    assert placed(router, "5f3a") == placed(router, "5f3a"), "sticky, as verl's"


def test_servers_that_leave_and_routes_that_are_cleared_are_forgotten() -> None:
    router = TreeRouter(dict.fromkeys("ab"))
    (home,) = placed(router, "g/0")
    router.remove_servers([home])
    (other,) = set(placed(router, "g/0", "g/1"))
    assert other != home
    router.add_servers({home: None})
    assert placed(router, "g/2") == [other]
    router.clear_sticky_cache()
    assert placed(router, "g/0", "g/2") == [home] * 2
    router.remove_servers(["a", "b"])
    with pytest.raises(RuntimeError, match="No available servers"):
        router.acquire_server("g/0")


def test_verl_loads_the_router_that_the_trainers_set() -> None:
    config = config_of_mode("tree_sync").copy()
    prepare_config(config)
    path = config.actor_rollout_ref.rollout.router_config_path
    assert path == str(TREE_ROUTER)
    settings = verls_router._load_router_yaml(path)
    made = verls_router._resolve_router_class(settings["router_class"])({"a": "handle"}, settings)
    assert isinstance(made, TreeRouter) and made.acquire_server("g/0") == ("a", "handle")
    assert made.require_acquire_fields() == made.require_release_fields() == []


@pytest.mark.parametrize(
    ("key", "value", "expected"), [("full_determinism", True, None), ("router_config_path", "mine.yaml", "mine.yaml")]
)
def test_a_router_of_the_user_and_deterministic_routing_stay(key: str, value: Any, expected: str | None) -> None:
    config = config_of_mode("tree_sync").copy()
    config.actor_rollout_ref.rollout[key] = value
    prepare_config(config)
    assert config.actor_rollout_ref.rollout.router_config_path == expected
