"""A small agent over one client library: asks, runs the tool that it is told to run, asks again, prints the answer.

Usage: PYTHON sdk_client.py CLIENT whole|streamed, with the gateway's variables. Needs only the client's own package.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

MODEL = "policy"
ASKED = "List the files."
DESCRIPTION = "Run a shell command."
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
LISTING = "lru.py\ntests"
GOOGLE_URL = os.environ.get("ANTHROPIC_BASE_URL", "")
KEY = os.environ.get("OPENAI_API_KEY", "")


def shell(command: str) -> str:
    """Run a shell command.

    Args:
        command: what to run.
    """
    return LISTING


def openai_chat(streamed: bool) -> str:
    """Chat completions of the package `openai`."""
    import openai

    completions: Any = openai.OpenAI().chat.completions

    def ask(**asked: Any) -> Any:
        if not streamed:
            return completions.create(model=MODEL, **asked)
        with completions.stream(model=MODEL, **asked) as events:
            return events.get_final_completion()

    return _chat(ask)


def _chat(ask: Callable[..., Any]) -> str:
    """Chat until the model calls no tool; `ask` returns a chat completion."""
    tools = [{"type": "function", "function": {"name": "shell", "description": DESCRIPTION, "parameters": SCHEMA}}]
    talk: list[Any] = [{"role": "user", "content": ASKED}]
    while True:
        message = ask(messages=talk, tools=tools).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        talk.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        talk += [{"role": "tool", "tool_call_id": call.id, "content": LISTING} for call in message.tool_calls]


def openai_responses(streamed: bool) -> str:
    """Responses of the package `openai`, stateless."""
    import openai

    tools: Any = [{"type": "function", "name": "shell", "description": DESCRIPTION, "parameters": SCHEMA}]
    talk: list[Any] = [{"role": "user", "content": ASKED}]
    client = openai.OpenAI()
    while True:
        if streamed:
            with client.responses.stream(model=MODEL, input=talk, tools=tools, store=False) as events:
                answer: Any = events.get_final_response()
        else:
            answer = client.responses.create(model=MODEL, input=talk, tools=tools, store=False)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        talk += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        talk += [{"type": "function_call_output", "call_id": call.call_id, "output": LISTING} for call in calls]


def anthropic_messages(streamed: bool) -> str:
    """Messages of the package `anthropic`."""
    import anthropic

    client = anthropic.Anthropic()
    talk: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "tools": [{"name": "shell", "description": DESCRIPTION, "input_schema": SCHEMA}],
    }
    while True:
        if streamed:
            with client.messages.stream(messages=talk, **asked) as events:
                answer: Any = events.get_final_message()
        else:
            answer = client.messages.create(messages=talk, **asked)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        talk.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": LISTING} for call in calls]
        talk.append({"role": "user", "content": results})


def google_genai(streamed: bool) -> str:
    """generateContent of the package `google-genai`."""
    from google import genai
    from google.genai import types

    client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=GOOGLE_URL))
    declared = types.FunctionDeclaration(name="shell", description=DESCRIPTION, parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
    talk: list[Any] = [types.Content(role="user", parts=[types.Part(text=ASKED)])]
    while True:
        if streamed:
            chunks = client.models.generate_content_stream(model=MODEL, contents=talk, config=config)
            parts = [part for chunk in chunks for one in chunk.candidates or () for part in one.content.parts or ()]
        else:
            answer = client.models.generate_content(model=MODEL, contents=talk, config=config)
            parts = list(answer.candidates[0].content.parts)
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text or "" for part in parts)
        talk.append(types.Content(role="model", parts=parts))
        results = [types.Part.from_function_response(name=one.name, response={"output": LISTING}) for one in calls]
        talk.append(types.Content(role="user", parts=results))


def litellm_chat(streamed: bool) -> str:
    """Chat completions over litellm."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    def ask(**asked: Any) -> Any:
        answer: Any = litellm.completion(model=f"openai/{MODEL}", stream=streamed, **asked)
        return litellm.stream_chunk_builder(list(answer), messages=asked["messages"]) if streamed else answer

    return _chat(ask)


def openai_agents(streamed: bool) -> str:
    """OpenAI Agents SDK with its default, the Responses API."""
    import agents

    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="main", model=MODEL, tools=[agents.function_tool(shell)])

    async def run() -> str:
        if not streamed:
            return str((await agents.Runner.run(agent, ASKED)).final_output)
        running = agents.Runner.run_streamed(agent, ASKED)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(run())


def langchain(streamed: bool) -> str:
    """LangChain's ChatOpenAI in LangGraph's prebuilt agent."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL, streaming=streamed), [shell])
    done = agent.invoke({"messages": [("user", ASKED)]})
    return str(done["messages"][-1].content)


def pydantic_ai(streamed: bool) -> str:
    """pydantic-ai over chat completions."""
    from pydantic_ai import Agent

    agent = Agent(f"openai-chat:{MODEL}", tools=[shell])

    async def run() -> str:
        if not streamed:
            return str((await agent.run(ASKED)).output)
        async with agent.run_stream(ASKED) as running:
            return str(await running.get_output())

    return asyncio.run(run())


def tool_runner(streamed: bool) -> str:
    """Anthropic's own loop, which asks for a server-held thread first."""
    import anthropic

    runner: Any = anthropic.Anthropic().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=500,
        tools=[anthropic.beta_tool(shell)],
        messages=[{"role": "user", "content": ASKED}],
        stream=streamed,
    )
    messages = [turn.get_final_message() if streamed else turn for turn in runner]
    return "".join(block.text for block in messages[-1].content if block.type == "text")


def smolagents_tools(streamed: bool) -> str:
    """smolagents' ToolCallingAgent: every turn must call a tool, and the last one answers."""
    import smolagents

    model = smolagents.OpenAIModel(MODEL, api_key=KEY)
    tools = [smolagents.tool(shell)]
    agent = smolagents.ToolCallingAgent(tools, model, stream_outputs=streamed, verbosity_level=0)
    return str(agent.run(ASKED))


def instructor_model(streamed: bool) -> str:
    """instructor: an answer is the arguments of a call that is forced."""
    import instructor
    import openai
    from pydantic import BaseModel, create_model

    client = instructor.from_openai(openai.OpenAI())
    made: type[BaseModel] = create_model("Answer", answer=(str, ...))
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}]}
    if streamed:
        *_, last = client.chat.completions.create_partial(response_model=made, **asked)
        return str(last.model_dump()["answer"])
    return str(client.chat.completions.create(response_model=made, **asked).model_dump()["answer"])


def langchain_structured(streamed: bool) -> str:
    """LangChain's `with_structured_output` by a forced call."""
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field, create_model

    made: type[BaseModel] = create_model("Answer", answer=(str, Field(description="what is asked for")))
    model = ChatOpenAI(model=MODEL, streaming=streamed).with_structured_output(made, method="function_calling")
    return str(dict(model.invoke(ASKED))["answer"])


def autogen(streamed: bool) -> str:
    """AutoGen's AssistantAgent."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able: Any = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    client = OpenAIChatCompletionClient(model=MODEL, model_info={**able, "family": "unknown"})
    agent = AssistantAgent("main", client, tools=[shell], reflect_on_tool_use=True, model_client_stream=streamed)
    return str(asyncio.run(agent.run(task=ASKED)).messages[-1].to_text())


def agno(streamed: bool) -> str:
    """Agno's Agent over a server that is like OpenAI's."""
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    address = os.environ["OPENAI_BASE_URL"]
    agent = Agent(model=OpenAILike(id=MODEL, base_url=address, api_key=KEY), tools=[shell], telemetry=False)
    if not streamed:
        return str(agent.run(ASKED).content)
    return "".join(one.content or "" for one in agent.run(ASKED, stream=True) if one.event == "RunContent")


def llama_index(streamed: bool) -> str:
    """LlamaIndex's FunctionAgent."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    address = os.environ["OPENAI_BASE_URL"]
    able: Any = {"is_chat_model": True, "is_function_calling_model": True}
    agent = FunctionAgent(
        tools=[shell], llm=OpenAILike(model=MODEL, api_base=address, api_key=KEY, **able), streaming=streamed
    )

    async def run() -> str:
        return str(await agent.run(ASKED))

    return asyncio.run(run())


CLIENTS: dict[str, tuple[str, Callable[[bool], str]]] = {
    "openai chat": ("openai", openai_chat),
    "openai responses": ("openai", openai_responses),
    "anthropic": ("anthropic", anthropic_messages),
    "google-genai": ("google-genai", google_genai),
    "litellm": ("litellm", litellm_chat),
    "openai-agents": ("openai-agents", openai_agents),
    "langgraph": ("langgraph", langchain),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
    "anthropic tool_runner": ("anthropic", tool_runner),
    "smolagents tools": ("smolagents", smolagents_tools),
    "instructor": ("instructor", instructor_model),
    "langchain structured": ("langchain-openai", langchain_structured),
    "autogen": ("autogen-agentchat", autogen),
    "agno": ("agno", agno),
    "llama-index": ("llama-index-core", llama_index),
}
"""Name -> package, agent."""
ANSWER_TOOLS: dict[str, tuple[str, bool]] = {
    "smolagents tools": ("final_answer", True),
    "instructor": ("Answer", False),
    "langchain structured": ("Answer", False),
}
"""Clients whose model answers by a call: its tool, and whether it calls the shell before."""


def main() -> None:
    """Print the package's version and the agent's answer as JSON."""
    package, play = CLIENTS[sys.argv[1]]
    with contextlib.redirect_stdout(sys.stderr):  # some libraries print what they do
        answer = play(sys.argv[2] == "streamed")
    print(json.dumps({"version": version(package), "answer": answer}))


if __name__ == "__main__":
    main()
