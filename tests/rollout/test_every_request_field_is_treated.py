"""Every field that OpenAI's and Anthropic's SDKs can send is honoured, without effect or refused, as the docs say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types.chat import completion_create_params

from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError
from tree_rl.rollout.gateway.protocols.request_fields import (
    CHAT_FIELDS,
    MESSAGE_FIELDS,
    FieldTreatment,
    check_fields,
)

PAGE = Path(__file__).parents[2] / "docs" / "request_fields.md"


@pytest.mark.parametrize(
    ("sent", "treated"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, CHAT_FIELDS),
        (message_create_params.MessageCreateParamsStreaming, MESSAGE_FIELDS),
        (beta_message_create_params.MessageCreateParamsStreaming, MESSAGE_FIELDS),
        (message_count_tokens_params.MessageCountTokensParams, MESSAGE_FIELDS),
    ],
)
def test_every_field_of_the_sdks_is_treated(sent: Any, treated: Mapping[str, FieldTreatment]) -> None:
    assert set(get_type_hints(sent)) - set(treated) == set()


def items(treated: Mapping[str, FieldTreatment]) -> list[str]:
    """The items of a list: fields of one treatment share an item."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, one in treated.items():
        names.setdefault((one.effect, one.note), []).append(f"`{name}`")
    return [f"{', '.join(fields)} ({effect}): {note}" for (effect, note), fields in names.items()]


@pytest.mark.parametrize(("title", "treated"), [("OpenAI", CHAT_FIELDS), ("Anthropic", MESSAGE_FIELDS)])
def test_the_docs_show_every_treatment(title: str, treated: Mapping[str, FieldTreatment]) -> None:
    (section,) = (part for part in PAGE.read_text().split("\n## ") if part.startswith(f"Fields of {title}"))
    shown = [" ".join(item.split()) for item in section.split("\n* ")[1:]]
    assert shown == items(treated)


def test_refused_fields_are_refused_only_where_they_ask_for_something() -> None:
    for treated in (CHAT_FIELDS, MESSAGE_FIELDS):
        for name, one in treated.items():
            if one.effect == "refused":
                with pytest.raises(RequestError, match=name):
                    check_fields(Fields({name: [1]}), treated)
            for value in (None, False, 0, [], {}, "", *one.neutral):
                assert check_fields(Fields({name: value}), treated) == ()
    assert check_fields(Fields({"sparkle": 1, "n": 2}), CHAT_FIELDS) == ("field sparkle",)
