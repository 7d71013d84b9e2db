"""Harnesses as their users start them, with what makes them edit their context."""

import json
from dataclasses import replace

from tree_rl.rollout.agents.harnesses import ClaudeCode, OpenCode, QwenCode

SAY = 'import json, sys; print(json.dumps({"type": "user", "message": {"role": "user", "content": sys.argv[1]}}))'
QWEN_SETTINGS = {"model": {"chatCompression": {"contextPercentageThreshold": 0.2}}}
"""Settings that compress at a fifth of the 131,072 tokens that Qwen Code takes for the context of a model that it does
not know."""
OPENCODE_MODEL = {"limit": {"context": 24_000, "output": 2_000}}
PRUNED_STEPS = (21, 22, 23)
"""Steps by the end of each later question."""


def _of_opencode(**more: object) -> dict[str, str]:
    """opencode's variables with further entries of its configuration."""
    variables = OpenCode.harness.variables
    configured = json.loads(variables["OPENCODE_CONFIG_CONTENT"]) | more
    return {**variables, "OPENCODE_CONFIG_CONTENT": json.dumps(configured)}


class ClearingClaudeCode(ClaudeCode):
    """Gets the task, `/clear` and the task again, in one process. It would drop a task that waits behind `/clear`."""

    harness = replace(
        ClaudeCode.harness,
        command=(
            f"say() {{ python3 -c '{SAY}' \"$1\"; }}; out=$HOME/out; : >$out; "
            '{ say {prompt}; say /clear; until [ $(grep -c \'^{"type":"result"\' $out) -ge 2 ]; do sleep 0.2; done; '
            "say {prompt}; } | {program} {arguments} --print --verbose --input-format stream-json "
            "--output-format stream-json --dangerously-skip-permissions --model {model} >$out; end=$?; cat $out; "
            "(exit $end)"
        ),
    )


class CompactingOpenCode(OpenCode):
    """Knows a context of 24,000 tokens."""

    harness = replace(
        OpenCode.harness,
        variables={
            name: value.replace('"models": {"{model}": {}}', f'"models": {{"{{model}}": {json.dumps(OPENCODE_MODEL)}}}')
            for name, value in _of_opencode(compaction={"auto": True, "reserved": 2000}).items()
        },
    )


class PruningOpenCode(OpenCode):
    """Gets three more questions; behind the second it clears what tools returned before the latest 40,000 tokens.

    It does so beside its work, and a program that ends with its answer would not come to it: one serves, others ask.
    """

    harness = replace(
        OpenCode.harness,
        command=(
            "{program} serve --port 4096 >/dev/null & "
            "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 4096))' 2>/dev/null; "
            "do sleep 0.2; done; "
            + " && sleep 2 && ".join(
                f"{{program}} run --attach http://127.0.0.1:4096 {asked}"
                for asked in (
                    "{arguments} --model tree_rl/{model} {prompt}",
                    *(f"--continue --model tree_rl/{{model}} 'Go on. [go on to {steps}]'" for steps in PRUNED_STEPS),
                )
            )
        ),
        variables=_of_opencode(compaction={"prune": True}),
    )


class CompactingQwenCode(QwenCode):
    """Compacts at a fifth of its context."""

    harness = replace(
        QwenCode.harness,
        command=f"mkdir -p $HOME/.qwen && echo '{json.dumps(QWEN_SETTINGS)}' >$HOME/.qwen/settings.json && "
        + QwenCode.harness.command,
    )
