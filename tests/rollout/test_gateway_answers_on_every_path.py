"""Every protocol answers with and without its version, below a session's address or an agent's, and by the key."""

from types import SimpleNamespace

import httpx
from gateway_harness import talking

CHAT = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 2}
INPUT = {"input": "q", "max_output_tokens": 2}
CONTENTS = {"contents": [{"parts": [{"text": "q"}]}], "generationConfig": {"maxOutputTokens": 2}}
PATHS = {
    **{f"{version}/chat/completions": CHAT for version in ("", "/v1")},
    **{f"{version}/messages": CHAT for version in ("", "/v1")},
    **{f"{version}/messages/count_tokens": CHAT for version in ("", "/v1")},
    **{f"{version}/responses": INPUT for version in ("", "/v1")},
    **{f"{version}/responses/input_tokens": INPUT for version in ("", "/v1")},
    **{f"{version}/models/a/b:generateContent": CONTENTS for version in ("", "/v1", "/v1beta")},
    **{f"{version}/models/a:countTokens": CONTENTS for version in ("", "/v1", "/v1beta")},
}


async def test_every_path_answers_below_every_address(tiny: SimpleNamespace) -> None:
    agents = []
    async with talking(tiny.backend()) as talk:
        client, url = talk.http, talk.endpoint.url
        root = url.split("/s/")[0]
        for address, agent in (
            (url, "main"),
            (talk.endpoint.named("x").url, "x"),
            (root, "main"),
            (f"{root}/a/y", "y"),
        ):
            for path, body in PATHS.items():
                answer = await client.post(address + path, json=body)
                assert answer.status_code == 200, (address, path, answer.text)
                agents += [] if "oken" in path.rsplit("/", 1)[1] else [agent]
            for version in ("", "/v1", "/v1beta"):
                assert "policy" in (await client.get(f"{address}{version}/models")).text
            stored = (await client.post(f"{address}/v1/responses", json=INPUT)).json()["id"]
            agents.append(agent)
            for version in ("", "/v1"):
                of_it = f"{address}{version}/responses/{stored}"
                assert (await client.get(of_it)).json()["id"] == stored
                assert len((await client.get(f"{of_it}/input_items")).json()["data"]) == 1
                assert (await client.post(f"{of_it}/cancel")).status_code == 400
            assert (await client.delete(f"{address}/responses/{stored}")).json()["deleted"]
        assert [call.agent for call in (await talk.close()).calls] == agents


async def test_nobody_reads_the_responses_of_another_session(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk, httpx.AsyncClient() as client:
        mine, other = talk.endpoint, talk.gateway.endpoint(talk.gateway.open_session())
        root = mine.url.split("/s/")[0]

        async def ask(method: str, url: str, token: str, body: object = None) -> httpx.Response:
            return await client.request(method, url, json=body, headers={"authorization": f"Bearer {token}"})

        stored = (await ask("POST", f"{mine.url}/responses", mine.token, INPUT)).json()["id"]
        for base, token, status in (
            (mine.url, other.token, 401),
            (other.url, other.token, 404),
            (root, other.token, 404),
            (root, "wrong", 401),
            (root, mine.token, 200),
        ):
            answer = await ask("GET", f"{base}/responses/{stored}", token)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["message"]
        body = {**INPUT, "previous_response_id": stored}
        assert (await ask("POST", f"{other.url}/responses", other.token, body)).status_code == 404
